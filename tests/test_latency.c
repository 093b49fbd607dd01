/*
 * test_latency.c - examples/latency.h: exact percentiles of known times, buckets of a histogram with their bounds, and
 * the clock.
 */
#include "../examples/latency.h"
#include "../tieredkv.h"
#include "tkv_test.h"

enum { MOST = 4096 };

/* A latency with the first token after 1 second, then the times 1 to n ms, in an order that is not sorted. */
static latency known_times(double *times, int n) {
    latency l = latency_begin(times, MOST);
    int i;
    latency_add(&l, 1);
    for (i = 0; i < n; i++) latency_add(&l, (1 + (i * 7) % n) * 1e-3);
    return l;
}

#ifndef __wasi__ /* there are no temporary files there */
/* Writes the histograms into `text`. */
static void print_histograms(const latency *l, char *text, size_t size) {
    FILE *f = tmpfile();
    text[0] = 0;
    REQUIRE(f != NULL);
    latency_write_histograms(l, f);
    rewind(f);
    text[fread(text, 1, size - 1, f)] = 0;
    fclose(f);
}
#endif

static void check_percentile(int n, int percent, double ms) {
    static double times[MOST];
    latency l = known_times(times, n);
    latency_sort(&l);
    CHECK_EQ(l.n, n);
    CHECK_NEAR(latency_percentile(&l, percent) * 1e3, ms, 1e-9);
}

TEST(percentiles_are_exact) { /* nearest rank: the time number ceil(percent * n / 100) */
    check_percentile(100, 50, 50);
    check_percentile(100, 95, 95);
    check_percentile(100, 99, 99);
    check_percentile(100, 100, 100);
    check_percentile(100, 1, 1);
    check_percentile(1, 50, 1);
    check_percentile(1, 99, 1);
    check_percentile(2, 50, 1);
    check_percentile(2, 51, 2);
    check_percentile(10, 95, 10);
    check_percentile(101, 50, 51);
    check_percentile(101, 99, 100);
    check_percentile(3998, 99, 3959); /* 3958.02 */
    check_percentile(0, 99, 0);
}

TEST(percentiles_against_their_definition) {
    static double times[MOST];
    tkv_rng r = tkv_rng_seed(3);
    int n, percent, i, below, at_most;
    for (n = 1; n < 120; n += 7) {
        latency l = latency_begin(times, MOST);
        latency_add(&l, 9);
        for (i = 0; i < n; i++) latency_add(&l, tkv_rng_below(&r, 20)); /* some are equal */
        latency_sort(&l);
        for (percent = 1; percent <= 100; percent++) {
            const double x = latency_percentile(&l, percent);
            for (i = below = at_most = 0; i < n; i++) {
                below += times[i] < x;
                at_most += times[i] <= x;
            }
            CHECK_LE(percent * n, at_most * 100);
            CHECK(below * 100 < percent * n);
        }
    }
}

TEST(the_first_token_is_apart) {
    double times[2];
    latency l = latency_begin(times, 2);
    latency_add(&l, 5);
    CHECK_EQ(l.n, 0);
    CHECK_NEAR(l.first, 5, 0);
    latency_add(&l, 3);
    latency_add(&l, 2);
    latency_add(&l, 1); /* does not fit */
    CHECK_EQ(l.n, 2);
    CHECK_EQ(l.n_tokens, 4);
    CHECK_NEAR(times[0], 3, 0);
    CHECK_NEAR(l.first, 5, 0);
}

#ifndef __wasi__
TEST(buckets_include_their_bound) {
    double times[8];
    char text[8192];
    latency l = latency_begin(times, 8);
    latency_add(&l, .3);
    latency_add(&l, .001); /* a bound belongs to its bucket */
    latency_add(&l, .0011);
    latency_add(&l, 61);
    print_histograms(&l, text, sizeof text);
    CHECK(strstr(text, "# TYPE model_time_between_tokens_seconds histogram\n") != NULL);
    CHECK(strstr(text, "model_time_between_tokens_seconds_bucket{le=\"0.0005\"} 0\n") != NULL);
    CHECK(strstr(text, "model_time_between_tokens_seconds_bucket{le=\"0.001\"} 1\n") != NULL);
    CHECK(strstr(text, "model_time_between_tokens_seconds_bucket{le=\"0.0025\"} 2\n") != NULL);
    CHECK(strstr(text, "model_time_between_tokens_seconds_bucket{le=\"60\"} 2\n") != NULL);
    CHECK(strstr(text, "model_time_between_tokens_seconds_bucket{le=\"+Inf\"} 3\n") != NULL);
    CHECK(strstr(text, "model_time_between_tokens_seconds_sum 61.0021\n") != NULL);
    CHECK(strstr(text, "model_time_between_tokens_seconds_count 3\n") != NULL);
    CHECK(strstr(text, "model_time_to_first_token_seconds_bucket{le=\"0.25\"} 0\n") != NULL);
    CHECK(strstr(text, "model_time_to_first_token_seconds_bucket{le=\"0.5\"} 1\n") != NULL);
    CHECK(strstr(text, "model_time_to_first_token_seconds_count 1\n") != NULL);
}

TEST(no_token) {
    double times[1];
    char text[8192];
    latency l = latency_begin(times, 1);
    print_histograms(&l, text, sizeof text);
    CHECK(strstr(text, "first_token_seconds_count 0\n") != NULL);
    CHECK(strstr(text, "first_token_seconds_sum 0\n") != NULL);
}
#endif

TEST(the_clock) {
    double times[4];
    latency l = latency_begin(times, 4);
    const double begun = l.mark;
    double since;
    int i;
    while (latency_now() < begun + .02) continue;
    latency_token(&l);
    CHECK(l.first >= .02);
    since = latency_now();
    while (latency_now() < since + .1) continue;
    latency_exclude(&l, since);
    latency_token(&l);
    CHECK_EQ(l.n, 1);
    CHECK(times[0] < .1);
    CHECK(times[0] >= 0);
    for (i = 0; i < 2; i++) latency_token(&l);
    CHECK_EQ(l.n, 3);
}

int main(int argc, char **argv) {
    tkv_test_begin(argc, argv);
    RUN(percentiles_are_exact);
    RUN(percentiles_against_their_definition);
    RUN(the_first_token_is_apart);
#ifndef __wasi__
    RUN(buckets_include_their_bound);
    RUN(no_token);
#endif
    RUN(the_clock);
    return tkv_test_end();
}
