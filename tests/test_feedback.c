/*
 * test_feedback.c - the quality controller: its scores, its rules and limits by hand, its report against plain
 * sums. A simulated cache follows its advice: quality drifts, and must be back within 100 scores, without swinging.
 *
 * The tests cover three faults of the original design. It divided by 100 when it had one score. It compared with
 * limits that no score can reach. It changed numbers that nothing used.
 */
#include "kit.h"

static const uint32_t NONFINITE[] = {0x7fc00000u, 0x7f800000u, 0xff800000u};

static tkv_feedback make_controller(const tkv_feedback_config *cfg) {
    tkv_feedback f;
    char reason[200] = "x";
    const tkv_status st = tkv_init_feedback(&f, cfg, reason, sizeof reason);
    CHECK_MSG(st == TKV_OK, "%s", reason);
    CHECK_STR(reason, "");
    return f;
}

/* Starts a controller again. */
static void restart_controller(tkv_feedback *f, const tkv_feedback_config *cfg) {
    CHECK_EQ(tkv_init_feedback(f, cfg, NULL, 0), TKV_OK);
}

static void observe_times(tkv_feedback *f, double score, int times) {
    while (times--) CHECK_EQ(tkv_observe_score(f, (float)score), TKV_OK);
}

static tkv_advice get_advice(tkv_feedback *f, int hot, int level) {
    tkv_advice a;
    memset(&a, 0xff, sizeof a);
    CHECK_EQ(tkv_get_advice(f, hot, level, &a), TKV_OK);
    CHECK(a.reason != NULL && *a.reason);
    CHECK_EQ(a.level, level + a.step);
    if (a.kind == TKV_ADVICE_KEEP) CHECK(a.hot_tokens == hot && a.level == level);
    return a;
}

static tkv_feedback_info get_info(tkv_feedback *f, int n_newest) {
    tkv_feedback_info i;
    memset(&i, 0xff, sizeof i);
    CHECK_EQ(tkv_get_feedback(f, n_newest, &i), TKV_OK);
    return i;
}

/* >>scores */
TEST(scores_from_ppl) {
    CHECK_NEAR(score_of(TKV_SCORE_PERPLEXITY, 20, 20, NULL, 0), 1, 0);
    CHECK_NEAR(score_of(TKV_SCORE_PERPLEXITY, 20, 20.6, NULL, 0), .97, 1e-6);
    CHECK_NEAR(score_of(TKV_SCORE_PERPLEXITY, 20, 30, NULL, 0), .5, 1e-6);
    CHECK_NEAR(score_of(TKV_SCORE_PERPLEXITY, 20, 19, NULL, 0), 1, 0); /* better than exact: no loss */
    CHECK_NEAR(score_of(TKV_SCORE_PERPLEXITY, 20, 50, NULL, 0), 0, 0);
    CHECK_NEAR(score_of(TKV_SCORE_PERPLEXITY, 1, 1.25, NULL, 0), .75, 1e-6);
    CHECK_EQ(score_of(TKV_SCORE_PERPLEXITY, .5, 2, NULL, 0), -1); /* no perplexity is below 1 */
    CHECK_EQ(score_of(TKV_SCORE_PERPLEXITY, 2, .5, NULL, 0), -1);
    CHECK_EQ(score_of(TKV_SCORE_PERPLEXITY, 0, 2, NULL, 0), -1);
}

TEST(scores_from_accuracy) {
    CHECK_NEAR(score_of(TKV_SCORE_ACCURACY, .8, .8, NULL, 0), 1, 0);
    CHECK_NEAR(score_of(TKV_SCORE_ACCURACY, .8, .72, NULL, 0), .9, 1e-6);
    CHECK_NEAR(score_of(TKV_SCORE_ACCURACY, 80, 72, NULL, 0), .9, 1e-6); /* any unit */
    CHECK_NEAR(score_of(TKV_SCORE_ACCURACY, .8, .9, NULL, 0), 1, 0);
    CHECK_NEAR(score_of(TKV_SCORE_ACCURACY, .8, 0, NULL, 0), 0, 0);
    CHECK_EQ(score_of(TKV_SCORE_ACCURACY, 0, .5, NULL, 0), -1);
    CHECK_EQ(score_of(TKV_SCORE_ACCURACY, .5, -.1, NULL, 0), -1);
}

TEST(scores_from_quality) {
    tkv_quality_info q;
    memset(&q, 0, sizeof q);
    CHECK_EQ(score_of(TKV_SCORE_METER, 0, 0, NULL, 0), -1);
    CHECK_EQ(score_of(TKV_SCORE_METER, 0, 0, &q, 0), -1); /* no samples, or no meter */
    q.samples = 10;
    q.coverage = 1;
    CHECK_NEAR(score_of(TKV_SCORE_METER, 0, 0, &q, 0), 1, 0); /* nothing was coded yet */
    q.output_error = .02;
    CHECK_NEAR(score_of(TKV_SCORE_METER, 0, 0, &q, 0), .98, 1e-6);
    CHECK_NEAR(score_of(TKV_SCORE_METER, 0, 0, &q, .5), .99, 1e-6);
    q.coverage = .5; /* half of the coded blocks had a copy, so their error counts twice */
    CHECK_NEAR(score_of(TKV_SCORE_METER, 0, 0, &q, 0), .96, 1e-6);
    CHECK_NEAR(score_of(TKV_SCORE_METER, 0, 0, &q, 6), .76, 1e-6);
    q.coverage = .05;
    CHECK_NEAR(score_of(TKV_SCORE_METER, 0, 0, &q, 0), .6, 1e-6);
    q.output_error = .06;
    CHECK_NEAR(score_of(TKV_SCORE_METER, 0, 0, &q, 0), 0, 0);
    CHECK_EQ(score_of(TKV_SCORE_METER, 0, 0, &q, -1), -1);
    q.coverage = .049;
    CHECK_EQ(score_of(TKV_SCORE_METER, 0, 0, &q, 0), -1);
    q.coverage = 1;
    q.output_error = -.1;
    CHECK_EQ(score_of(TKV_SCORE_METER, 0, 0, &q, 0), -1);
}

TEST(scores_of_nonfinite_numbers) {
    int i;
    for (i = 0; i < COUNT(NONFINITE); i++) {
        const double bad = (double)tkv_test_float(NONFINITE[i]);
        tkv_quality_info q;
        memset(&q, 0, sizeof q);
        q.samples = 1;
        q.coverage = 1;
        q.output_error = bad;
        CHECK_EQ(score_of(TKV_SCORE_PERPLEXITY, bad, 20, NULL, 0), -1);
        CHECK_EQ(score_of(TKV_SCORE_PERPLEXITY, 20, bad, NULL, 0), -1);
        CHECK_EQ(score_of(TKV_SCORE_ACCURACY, bad, .5, NULL, 0), -1);
        CHECK_EQ(score_of(TKV_SCORE_ACCURACY, .5, bad, NULL, 0), -1);
        CHECK_EQ(score_of(TKV_SCORE_METER, 0, 0, &q, 0), -1);
        q.output_error = 0;
        CHECK_EQ(score_of(TKV_SCORE_METER, 0, 0, &q, bad), -1);
        q.coverage = bad;
        CHECK_EQ(score_of(TKV_SCORE_METER, 0, 0, &q, 0), -1);
    }
}

/* >>the rules */
TEST(advises_nothing_before_16_scores) {
    tkv_feedback f = make_controller(NULL);
    tkv_advice a = get_advice(&f, 64, 2);
    CHECK_EQ(a.samples, 0);
    observe_times(&f, .5, 15);
    a = get_advice(&f, 64, 2);
    CHECK_EQ(a.kind, TKV_ADVICE_KEEP);
    CHECK_EQ(a.samples, 15);
    CHECK_NEAR(a.mean, .5, 1e-7);
    CHECK(strstr(a.reason, "fewer than 16"));
    observe_times(&f, .5, 1);
    CHECK_EQ(get_advice(&f, 64, 2).kind, TKV_ADVICE_FINER);
}

TEST(advises_finer_below_the_target) {
    tkv_feedback f = make_controller(NULL);
    tkv_advice a;
    observe_times(&f, .96, 16);
    a = get_advice(&f, 64, 2);
    CHECK_EQ(a.kind, TKV_ADVICE_FINER);
    CHECK_EQ(a.hot_tokens, 77); /* 64 x 1.2 = 76.8 */
    CHECK_EQ(a.level, 1);
    CHECK_EQ(a.step, -1);
    CHECK_EQ(a.samples, 16);
    CHECK_NEAR(a.mean, .96, 1e-6);
    CHECK(strstr(a.reason, "below the target"));
    CHECK_EQ(get_info(&f, 0).finer, 1);
    CHECK_EQ(get_info(&f, 0).cheaper, 0);
}

TEST(advises_cheaper_above_the_target) {
    tkv_feedback f = make_controller(NULL);
    tkv_advice a;
    observe_times(&f, .99, 16);
    a = get_advice(&f, 64, 2);
    CHECK_EQ(a.kind, TKV_ADVICE_CHEAPER);
    CHECK_EQ(a.hot_tokens, 57); /* 64 x 0.9 = 57.6 */
    CHECK_EQ(a.level, 3);
    CHECK_EQ(a.step, 1);
    CHECK_EQ(get_info(&f, 0).cheaper, 1);
}

/* Scores at the limits keep the plan. */
TEST(keeps_the_plan_between) {
    static const float scores[] = {.97f, .975f, .98f, .985f};
    int i;
    for (i = 0; i < COUNT(scores); i++) {
        tkv_feedback f = make_controller(NULL);
        observe_times(&f, (double)scores[i], 200);
        CHECK_EQ(get_advice(&f, 64, 2).kind, TKV_ADVICE_KEEP);
    }
}

/* A mean of .75 is where a target of .5 begins to be exceeded. All scores are above it, but not the newest 16. */
TEST(newest_scores_at_the_limit_keep_the_plan) {
    tkv_feedback_config cfg;
    tkv_feedback f;
    memset(&cfg, 0, sizeof cfg);
    cfg.target = .5f;
    f = make_controller(&cfg);
    observe_times(&f, 1.0, 184);
    observe_times(&f, .75, 16);
    CHECK_EQ(get_advice(&f, 64, 2).kind, TKV_ADVICE_KEEP);
    observe_times(&f, .8125, 1);
    CHECK_EQ(get_advice(&f, 64, 2).kind, TKV_ADVICE_CHEAPER);
}

TEST(targets) {
    static const struct {
        double target, score;
        tkv_advice_kind kind;
    } cases[] = {{.9, .89, TKV_ADVICE_FINER},   {.9, .91, TKV_ADVICE_KEEP},   {.9, .94, TKV_ADVICE_KEEP},
                 {.9, .96, TKV_ADVICE_CHEAPER}, {.5, .49, TKV_ADVICE_FINER},  {.5, .74, TKV_ADVICE_KEEP},
                 {.5, .76, TKV_ADVICE_CHEAPER}, {.99, .98, TKV_ADVICE_FINER}, {.99, 1, TKV_ADVICE_CHEAPER},
                 {.99, .994, TKV_ADVICE_KEEP}};
    int i;
    for (i = 0; i < COUNT(cases); i++) {
        tkv_feedback_config cfg;
        tkv_feedback f;
        memset(&cfg, 0, sizeof cfg);
        cfg.target = (float)cases[i].target;
        f = make_controller(&cfg);
        observe_times(&f, cases[i].score, 16);
        CHECK_MSG(get_advice(&f, 64, 1).kind == cases[i].kind, "%.2f for %.2f", cases[i].score,
                  cases[i].target);
    }
}

/* With 16 to 99 scores the mean must differ by two standard errors, with 100 scores by any amount. */
TEST(needs_significant_scores) {
    tkv_feedback f = make_controller(NULL);
    int n;
    for (n = 0; n < 99; n++) { /* mean .9685 or so, standard deviation .03, standard error .003 at the end */
        observe_times(&f, n % 2 ? .9985 : .9385, 1);
        CHECK_EQ(get_advice(&f, 64, 2).kind, TKV_ADVICE_KEEP);
    }
    observe_times(&f, .9985, 1);
    CHECK_EQ(get_advice(&f, 64, 2).kind, TKV_ADVICE_FINER);
    f = make_controller(NULL);
    for (n = 0; n < 16; n++) observe_times(&f, n % 2 ? .97 : .94, 1); /* .955, and .004 of error */
    CHECK_EQ(get_advice(&f, 64, 2).kind, TKV_ADVICE_FINER);
}

/* A hundred good scores do not hide 16 bad ones, and 16 good ones do not outweigh a low mean. */
TEST(newest_scores_count) {
    tkv_feedback f = make_controller(NULL);
    tkv_advice a;
    observe_times(&f, .984, 1000);
    observe_times(&f, .96, 15); /* the newest 16: .9615, but one of them is .024 off */
    CHECK_EQ(get_advice(&f, 64, 2).kind, TKV_ADVICE_FINER);
    f = make_controller(NULL);
    observe_times(&f, .984, 1000);
    observe_times(&f, .93, 3);
    CHECK_EQ(get_advice(&f, 64, 2).kind, TKV_ADVICE_KEEP);
    observe_times(&f, .93, 13);
    a = get_advice(&f, 64, 2);
    CHECK_EQ(a.kind, TKV_ADVICE_FINER);
    f = make_controller(NULL);
    observe_times(&f, .975, 100);
    observe_times(&f, 1, 16); /* mean .979 */
    CHECK_EQ(get_advice(&f, 64, 2).kind, TKV_ADVICE_KEEP);
    observe_times(&f, 1, 30); /* .9865 */
    CHECK_EQ(get_advice(&f, 64, 2).kind, TKV_ADVICE_CHEAPER);
    f = make_controller(NULL);
    observe_times(&f, 1, 84);
    observe_times(&f, .98, 16); /* mean .997, but .98 for the newest 16 */
    CHECK_EQ(get_advice(&f, 64, 2).kind, TKV_ADVICE_KEEP);
}

TEST(limits) {
    tkv_feedback_config cfg;
    tkv_feedback f;
    tkv_advice a;
    memset(&cfg, 0, sizeof cfg);
    cfg.min_hot = 40;
    cfg.max_hot = 100;
    cfg.min_level = 1;
    cfg.max_level = 2;
    f = make_controller(&cfg);
    observe_times(&f, .5, 16);
    a = get_advice(&f, 90, 1); /* the level is at its limit, hot tokens reach theirs */
    CHECK_EQ(a.kind, TKV_ADVICE_FINER);
    CHECK_EQ(a.hot_tokens, 100);
    CHECK_EQ(a.level, 1);
    CHECK_EQ(a.step, 0);
    observe_times(&f, .5, 24);
    a = get_advice(&f, 100, 1);
    CHECK_EQ(a.kind, TKV_ADVICE_KEEP);
    CHECK(strstr(a.reason, "limits"));
    restart_controller(&f, &cfg);
    observe_times(&f, .5, 16);
    a = get_advice(&f, 100, 2);
    CHECK(a.hot_tokens == 100 && a.level == 1);
    restart_controller(&f, &cfg);
    observe_times(&f, 1, 16);
    a = get_advice(&f, 42, 2);
    CHECK_EQ(a.kind, TKV_ADVICE_CHEAPER);
    CHECK_EQ(a.hot_tokens, 40);
    CHECK_EQ(a.step, 0);
    observe_times(&f, 1, 24);
    a = get_advice(&f, 40, 2);
    CHECK_EQ(a.kind, TKV_ADVICE_KEEP);
    CHECK(strstr(a.reason, "limits"));
    restart_controller(&f, &cfg);
    observe_times(&f, 1, 16);
    a = get_advice(&f, 40, 1);
    CHECK(a.hot_tokens == 40 && a.level == 2);
}

/* A value that is beyond its limit is not moved against the advice. */
TEST(beyond_limits) {
    tkv_feedback f = make_controller(NULL); /* 32 to 1024, levels 0 to 3 */
    tkv_advice a;
    observe_times(&f, .5, 16);
    a = get_advice(&f, 3000, 5);
    CHECK(a.hot_tokens == 3000 && a.level == 4);
    restart_controller(&f, NULL);
    observe_times(&f, .5, 16);
    a = get_advice(&f, 0x3fffffff, 0); /* everything is hot */
    CHECK_EQ(a.kind, TKV_ADVICE_KEEP);
    restart_controller(&f, NULL);
    observe_times(&f, .5, 16);
    a = get_advice(&f, 0, 0); /* no hot tokens */
    CHECK_EQ(a.hot_tokens, 32);
    restart_controller(&f, NULL);
    observe_times(&f, 1, 16);
    a = get_advice(&f, 3000, 0);
    CHECK(a.hot_tokens == 2700 && a.level == 1);
    restart_controller(&f, NULL);
    observe_times(&f, 1, 16);
    a = get_advice(&f, 8, 5);
    CHECK_EQ(a.kind, TKV_ADVICE_KEEP);
}

/* Steps of the hot tokens: times 1.2 up to 1,024, times 0.9 down to 32. */
TEST(hot_tokens) {
    static const int more[] = {32, 39, 47, 57, 69, 83, 100, 120, 144, 173};
    static const int less[] = {64, 57, 51, 45, 40, 36, 32, 32};
    tkv_feedback f = make_controller(NULL);
    int i, hot = 32;
    for (i = 0; i + 1 < COUNT(more); i++) {
        restart_controller(&f, NULL);
        observe_times(&f, .5, 16);
        hot = get_advice(&f, hot, 0).hot_tokens;
        CHECK_EQ(hot, more[i + 1]);
    }
    for (i = 0; i < 30; i++) {
        restart_controller(&f, NULL);
        observe_times(&f, .5, 16);
        hot = get_advice(&f, hot, 0).hot_tokens;
    }
    CHECK_EQ(hot, 1024);
    for (hot = 64, i = 0; i + 1 < COUNT(less); i++) {
        restart_controller(&f, NULL);
        observe_times(&f, 1, 16);
        hot = get_advice(&f, hot, 3).hot_tokens;
        CHECK_EQ(hot, less[i + 1]);
    }
}

/* >>changes of plan */
TEST(cooldown_after_a_change) {
    tkv_feedback_config cfg;
    tkv_feedback f = make_controller(NULL);
    int n;
    observe_times(&f, .9, 50);
    CHECK_EQ(get_advice(&f, 64, 3).kind, TKV_ADVICE_FINER);
    for (n = 0; n < 24; n++) { /* 8, then 16 */
        CHECK_EQ(get_advice(&f, 77, 2).kind, TKV_ADVICE_KEEP);
        observe_times(&f, .9, 1);
    }
    CHECK_EQ(get_advice(&f, 77, 2).kind, TKV_ADVICE_FINER);
    memset(&cfg, 0, sizeof cfg);
    cfg.cooldown = TKV_OFF;
    f = make_controller(&cfg);
    observe_times(&f, .9, 50);
    CHECK_EQ(get_advice(&f, 64, 3).kind, TKV_ADVICE_FINER);
    observe_times(&f, .9, 15);
    CHECK_EQ(get_advice(&f, 77, 2).kind, TKV_ADVICE_KEEP);
    observe_times(&f, .9, 1);
    CHECK_EQ(get_advice(&f, 77, 2).kind, TKV_ADVICE_FINER);
    cfg.cooldown = 200;
    f = make_controller(&cfg);
    observe_times(&f, .9, 16);
    CHECK_EQ(get_advice(&f, 64, 3).kind, TKV_ADVICE_FINER);
    observe_times(&f, .9, 215);
    CHECK_EQ(get_advice(&f, 77, 2).kind, TKV_ADVICE_KEEP);
    observe_times(&f, .9, 1);
    CHECK_EQ(get_advice(&f, 77, 2).kind, TKV_ADVICE_FINER);
}

/* Scores from before a change, and those of the cool-down, do not count. */
TEST(old_scores_do_not_count) {
    tkv_feedback f = make_controller(NULL);
    tkv_advice a;
    observe_times(&f, .5, 100);
    CHECK_EQ(get_advice(&f, 64, 3).kind, TKV_ADVICE_FINER);
    observe_times(&f, .5, 8);
    observe_times(&f, .98, 16);
    a = get_advice(&f, 77, 2);
    CHECK_EQ(a.kind, TKV_ADVICE_KEEP);
    CHECK_EQ(a.samples, 16);
    CHECK_NEAR(a.mean, .98, 1e-6);
    observe_times(&f, .98, 300);
    CHECK_EQ(get_advice(&f, 77, 2).samples, 100);
}

/* If the plan changes without advice, the scores start anew. */
TEST(plan_changed_without_advice) {
    tkv_feedback f = make_controller(NULL);
    observe_times(&f, .5, 15);
    CHECK_EQ(get_advice(&f, 64, 1).samples, 15);
    observe_times(&f, .5, 1);
    CHECK_EQ(get_advice(&f, 64, 2).samples, 0); /* the pressure controller changed the level */
    observe_times(&f, .5, 23);
    CHECK_EQ(get_advice(&f, 64, 2).samples, 15);
    CHECK_EQ(get_advice(&f, 65, 2).samples, 0);
    observe_times(&f, .5, 24);
    CHECK_EQ(get_advice(&f, 65, 2).kind, TKV_ADVICE_FINER);
    CHECK_EQ(get_advice(&f, 128, 1).samples, 0); /* the caller rounds 78 to 128: the advised change */
    observe_times(&f, .5, 24);
    CHECK_EQ(get_advice(&f, 128, 1).samples, 16);
}

/* A step to higher precision that raised quality is not reversed for 1,000 scores, unless quality has risen since. */
TEST(remembers_the_gain) {
    tkv_feedback f = make_controller(NULL);
    tkv_advice a;
    observe_times(&f, .96, 16);
    CHECK_EQ(get_advice(&f, 64, 3).kind, TKV_ADVICE_FINER);
    observe_times(&f, .99, 24); /* gained .03 */
    a = get_advice(&f, 77, 2);
    CHECK_EQ(a.kind, TKV_ADVICE_KEEP);
    CHECK(strstr(a.reason, "as it did before"));
    observe_times(&f, .99, 1000); /* still kept, 1,000 scores after the gain was measured */
    CHECK_EQ(get_advice(&f, 77, 2).kind, TKV_ADVICE_KEEP);
    observe_times(&f, .99, 1);
    CHECK_EQ(get_advice(&f, 77, 2).kind, TKV_ADVICE_CHEAPER); /* forgotten */
    f = make_controller(NULL);
    observe_times(&f, .965, 16);
    CHECK_EQ(get_advice(&f, 64, 3).kind, TKV_ADVICE_FINER);
    observe_times(&f, .98, 24); /* gained .015 */
    CHECK_EQ(get_advice(&f, 77, 2).kind, TKV_ADVICE_KEEP);
    observe_times(&f, .99, 200); /* .99 - .015 = .975, not above .97 + .0075 */
    CHECK_EQ(get_advice(&f, 77, 2).kind, TKV_ADVICE_KEEP);
    observe_times(&f, .994, 100); /* .979 */
    CHECK_EQ(get_advice(&f, 77, 2).kind, TKV_ADVICE_CHEAPER);
}

/* >>the report */
TEST(report_by_hand) {
    tkv_feedback f = make_controller(NULL);
    tkv_feedback_info i = get_info(&f, 0);
    CHECK(i.n == 0 && i.scores == 0 && i.meets_target == 0 && i.is_stable == 0 && i.is_improving == 0);
    CHECK_NEAR(i.average, 0, 0);
    observe_times(&f, .5, 1);
    i = get_info(&f, 0);
    CHECK_EQ(i.n, 1);
    CHECK_NEAR(i.average, .5, 0);
    CHECK_NEAR(i.deviation, 0, 0);
    CHECK_NEAR(i.trend, 0, 0);
    observe_times(&f, .75, 1);
    observe_times(&f, 1, 1);
    i = get_info(&f, 0);
    CHECK_NEAR(i.average, .75, 1e-7);
    CHECK_NEAR(i.least, .5, 0);
    CHECK_NEAR(i.most, 1, 0);
    CHECK_NEAR(i.deviation, .25, 1e-7);
    CHECK_NEAR(i.trend, .25, 1e-7);
    CHECK_EQ(i.is_improving, 0); /* three scores are no trend */
    i = get_info(&f, 2);
    CHECK_EQ(i.n, 2);
    CHECK_NEAR(i.average, .875, 1e-7);
    CHECK_EQ(get_info(&f, 1000).n, 3);
}

/* Compared with plain sums over a copy of the scores, for several numbers of newest scores. The ring wraps twice. */
TEST(report_against_sums) {
    static const int windows[] = {1, 2, 16, 99, 100, 101, 999, 1000};
    static double x[2500];
    tkv_rng r = tkv_rng_seed(3);
    tkv_feedback f = make_controller(NULL);
    int n, i, k;
    for (n = 0; n < COUNT(x);) {
        x[n] = (double)(float)(.9 + .1 * tkv_rng_uniform(&r) * (n % 700) / 700);
        observe_times(&f, x[n++], 1);
        if (n % 83) continue;
        for (k = 0; k < COUNT(windows); k++) {
            const int from = n > windows[k] ? n - windows[k] : 0, m = n - from;
            double mean = 0, square = 0, covariance = 0, variance_of_index = 0, least = 1, most = 0;
            tkv_feedback_info info = get_info(&f, windows[k]);
            for (i = from; i < n; i++) mean += x[i] / m;
            for (i = from; i < n; i++) {
                const double index = i - (n + from - 1) / 2.0;
                square += (x[i] - mean) * (x[i] - mean);
                covariance += index * (x[i] - mean);
                variance_of_index += index * index;
                least = x[i] < least ? x[i] : least;
                most = x[i] > most ? x[i] : most;
            }
            CHECK_EQ(info.n, m);
            CHECK_EQ(info.scores, n);
            CHECK_NEAR(info.average, mean, 1e-7);
            CHECK_NEAR(info.least, least, 0);
            CHECK_NEAR(info.most, most, 0);
            CHECK_NEAR(info.deviation * info.deviation, m > 1 ? square / (m - 1) : 0, 1e-7);
            CHECK_NEAR(info.trend, m > 1 ? covariance / variance_of_index : 0, 1e-7);
            CHECK_EQ(info.meets_target, info.average >= .97f);
        }
    }
}

TEST(stable_and_improving) {
    tkv_feedback f = make_controller(NULL);
    tkv_rng r = tkv_rng_seed(4);
    tkv_feedback_info i;
    int n;
    observe_times(&f, .98, 16);
    i = get_info(&f, 0);
    CHECK(i.meets_target && i.is_stable && !i.is_improving);
    for (n = 0; n < 100; n++) observe_times(&f, .9 + .0005 * n, 1); /* a straight line that rises by .05 */
    i = get_info(&f, 0);
    CHECK(!i.meets_target && !i.is_stable && i.is_improving);
    CHECK_NEAR(i.trend, .0005, 1e-7);
    for (n = 0; n < 100; n++) observe_times(&f, .95 - .0005 * n, 1);
    i = get_info(&f, 0);
    CHECK(!i.is_stable && !i.is_improving);
    CHECK_NEAR(i.trend, -.0005, 1e-7);
    for (n = 0; n < 100; n++) observe_times(&f, n % 2 ? .99 : .95, 1); /* deviation .02, above .015 */
    i = get_info(&f, 0);
    CHECK(i.trend > 0 && !i.is_stable && !i.is_improving); /* it rises, by chance */
    for (n = 0; n < 100; n++) observe_times(&f, .98 + .01 * (tkv_rng_uniform(&r) - .5), 1);
    i = get_info(&f, 0);
    CHECK(i.meets_target && i.is_stable && !i.is_improving);
}

/* >>a simulated cache */
/* A score is 1 - difficulty * loss of the level, plus noise. Each doubling of the hot tokens takes a fifth off
 * the loss. */
typedef struct simulated_cache {
    double loss[5]; /* of each level at 64 hot tokens, for a text of difficulty 1 */
    double difficulty, noise;
    int n_levels, hot, level;
    tkv_rng rng;
} simulated_cache;

static double compute_quality(const simulated_cache *w) {
    double loss_factor = 1, h;
    for (h = 32; h * 2 <= w->hot; h *= 2) loss_factor *= .8;
    return 1 - w->difficulty * w->loss[w->level] * loss_factor * (1 - .2 * (w->hot - h) / h) / .8;
}

typedef struct run_stats {      /* counts of one simulation */
    int n_changes, n_reversals; /* changes of the plan; changes of their direction */
    int last_change;            /* the score after which the plan changed last; 0: none */
    int last_below_target;      /* the last score with quality below the target, but for noise; 0: none */
} run_stats;

static run_stats simulate(simulated_cache *w, tkv_feedback *f, int steps) {
    const double needed_quality = .97 - .002 - w->noise / 5;
    run_stats c;
    tkv_advice_kind last_kind = TKV_ADVICE_KEEP;
    int n, bad = 0;
    memset(&c, 0, sizeof c);
    for (n = 1; n <= steps; n++) {
        const double x = compute_quality(w) + w->noise * tkv_rng_gauss(&w->rng);
        tkv_advice a;
        bad += tkv_observe_score(f, (float)(x < 0 ? 0 : x > 1 ? 1 : x)) != TKV_OK;
        bad += tkv_get_advice(f, w->hot, w->level, &a) != TKV_OK;
        bad += a.level < 0 || a.level >= w->n_levels || a.hot_tokens < 32 || a.hot_tokens > 1024;
        w->hot = a.hot_tokens;
        w->level = a.level;
        if (a.kind != TKV_ADVICE_KEEP) {
            c.n_changes++;
            c.last_change = n;
            c.n_reversals += last_kind != TKV_ADVICE_KEEP && a.kind != last_kind;
            last_kind = a.kind;
        }
        if (compute_quality(w) < needed_quality) c.last_below_target = n;
    }
    CHECK_EQ(bad, 0);
    return c;
}

/* A cache of three to five levels. Each level loses two to five times as much as the one before. */
static simulated_cache random_cache(double noise, tkv_rng *r) {
    simulated_cache w;
    int i;
    memset(&w, 0, sizeof w);
    w.n_levels = 3 + tkv_rng_below(r, 3);
    w.loss[1] = .0005 + .004 * tkv_rng_uniform(r);
    for (i = 2; i < w.n_levels; i++) w.loss[i] = w.loss[i - 1] * (2 + 3 * tkv_rng_uniform(r));
    w.difficulty = 1;
    w.noise = noise;
    w.hot = 64;
    w.rng = tkv_rng_seed(tkv_rng_u64(r));
    return w;
}

static tkv_feedback make_controller_for(const simulated_cache *w) {
    tkv_feedback_config cfg;
    memset(&cfg, 0, sizeof cfg);
    cfg.max_level = w->n_levels - 1;
    return make_controller(&cfg);
}

/* The advice makes an exact cache cheaper. Then the text gets harder: quality must be back in less than 100 scores,
 * and stay without swinging. */
TEST(converges) {
    static const double noises[] = {0, .002, .005, .01, .02};
    const int n_caches = tkv_test_quick() ? 40 : 400;
    int i, k;
    for (i = 0; i < COUNT(noises); i++) {
        tkv_rng r = tkv_rng_seed(11);
        int n_drifts = 0, most_below = 0, n_reversals = 0;
        for (k = 0; k < n_caches; k++) {
            simulated_cache w = random_cache(noises[i], &r);
            tkv_feedback f = make_controller_for(&w);
            run_stats c = simulate(&w, &f, 1000);
            CHECK(w.level > 0);
            CHECK_LE(c.n_reversals, noises[i] > .01 ? 3 : 2); /* one step too far, or two */
            w.difficulty = 1.2 + 10 * tkv_rng_uniform(&r);
            n_drifts += compute_quality(&w) < .97;
            c = simulate(&w, &f, 100);
            most_below = c.last_below_target > most_below ? c.last_below_target : most_below;
            CHECK_LE(c.last_below_target, 99);
            c = simulate(&w, &f, 900);
            n_reversals = c.n_reversals > n_reversals ? c.n_reversals : n_reversals;
            CHECK_LE(c.n_reversals, 2);
            CHECK_LE(c.n_changes, 6);
        }
        CHECK(n_drifts > n_caches / 2);
        printf("\n    noise %.3f: %d drifts, back in at most %d, then at most %d reversals in 900", noises[i],
               n_drifts, most_below, n_reversals);
    }
    printf("\n ");
}

/* The text stays the same: at most one trial step in 1,000 scores. */
TEST(does_not_swing) {
    const int n_caches = tkv_test_quick() ? 10 : 60;
    tkv_rng r = tkv_rng_seed(12);
    int k;
    for (k = 0; k < n_caches; k++) {
        simulated_cache w = random_cache(.001 * (k % 10), &r);
        tkv_feedback f = make_controller_for(&w);
        run_stats c;
        w.difficulty = .3 + 5 * tkv_rng_uniform(&r);
        simulate(&w, &f, 1000);
        c = simulate(&w, &f, 20000);
        CHECK_LE(c.n_reversals, 2 * 20);
    }
}

/* When the text gets easier again, remembered gains are forgotten, and the cache becomes as cheap as before. */
TEST(becomes_cheap_again) {
    tkv_rng r = tkv_rng_seed(13);
    int k;
    for (k = 0; k < 50; k++) {
        simulated_cache w = random_cache(.003, &r);
        tkv_feedback f = make_controller_for(&w);
        int level;
        simulate(&w, &f, 1200);
        level = w.level;
        w.difficulty = 6;
        simulate(&w, &f, 300);
        w.difficulty = .5;
        simulate(&w, &f, 1400);
        CHECK_LE(level, w.level);
    }
}

/* Times are printed and not checked. */
TEST(time_of_a_score) {
#ifdef __wasi__
    SKIP("no clock");
#else
    const int times = 200000;
    tkv_feedback f = make_controller(NULL);
    tkv_feedback_info info;
    tkv_advice a;
    clock_t start = clock();
    double ns[3];
    int n;
    for (n = 0; n < times; n++) (void)tkv_observe_score(&f, .975f);
    ns[0] = (double)(clock() - start);
    for (start = clock(), n = 0; n < times; n++) (void)tkv_get_advice(&f, 64, 2, &a);
    ns[1] = (double)(clock() - start);
    for (start = clock(), n = 0; n < times / 100; n++) (void)tkv_get_feedback(&f, 1000, &info);
    ns[2] = (double)(clock() - start) * 100;
    for (n = 0; n < 3; n++) ns[n] *= 1e9 / CLOCKS_PER_SEC / times;
    CHECK_EQ(info.scores, times);
    CHECK_EQ(a.samples, 100);
    printf("\n    ns: a score %.0f, advice on 100 %.0f, a report on 1,000 %.0f\n ", ns[0], ns[1], ns[2]);
#endif
}

/* >>refused arguments */
TEST(refuses_bad_calls) {
    static const double bad[] = {-.001, 1.001, -1, 100, 1e30};
    tkv_feedback f = make_controller(NULL), before;
    tkv_advice a, same;
    tkv_feedback_info info;
    char reason[200] = "x";
    int i;
    observe_times(&f, .9, 10);
    before = f;
    for (i = 0; i < COUNT(NONFINITE); i++)
        CHECK_EQ(tkv_observe_score(&f, tkv_test_float(NONFINITE[i])), TKV_ERR_ARG);
    for (i = 0; i < COUNT(bad); i++) CHECK_EQ(tkv_observe_score(&f, (float)bad[i]), TKV_ERR_ARG);
    CHECK_EQ(get_info(&f, 0).refused, COUNT(NONFINITE) + COUNT(bad));
    CHECK_EQ(get_info(&f, 0).scores, 10);
    f.refused = 0;
    CHECK_MEM(&f, &before, sizeof f); /* no other effect */
    memset(&a, 0x5a, sizeof a);
    same = a;
    CHECK_EQ(tkv_get_advice(NULL, 64, 1, &a), TKV_ERR_ARG);
    CHECK_EQ(tkv_get_advice(&f, 64, 1, NULL), TKV_ERR_ARG);
    CHECK_EQ(tkv_get_advice(&f, -1, 1, &a), TKV_ERR_ARG);
    CHECK_EQ(tkv_get_advice(&f, 0x40000000, 1, &a), TKV_ERR_ARG);
    CHECK_EQ(tkv_get_advice(&f, 64, -1, &a), TKV_ERR_ARG);
    CHECK_EQ(tkv_get_advice(&f, 64, TKV_MAX_LEVELS, &a), TKV_ERR_ARG);
    CHECK_MEM(&a, &same, sizeof a);
    CHECK_MEM(&f, &before, sizeof f);
    CHECK_EQ(tkv_observe_score(NULL, 1), TKV_ERR_ARG);
    CHECK_EQ(tkv_get_feedback(NULL, 0, &info), TKV_ERR_ARG);
    CHECK_EQ(tkv_get_feedback(&f, 0, NULL), TKV_ERR_ARG);
    CHECK_EQ(tkv_get_feedback(&f, -1, &info), TKV_ERR_ARG);
    CHECK_EQ(tkv_get_feedback(&f, 1001, &info), TKV_ERR_ARG);
    CHECK_EQ(tkv_init_feedback(NULL, NULL, reason, sizeof reason), TKV_ERR_ARG);
    CHECK_STR(reason, "");
}

TEST(configs) {
    static const struct {
        tkv_feedback_config cfg;
        const char *reason_has; /* the reason must have it; NULL: the config is valid */
    } cases[] = {
        {{0, 0, 0, 0, 0, 0}, NULL},          {{.5f, TKV_OFF, 1, 1, 0, TKV_OFF}, NULL},
        {{0, 1000, 2048, 0, 5, 0}, NULL},    {{0, 0, 0, 16, 0, 7}, NULL},
        {{.01f, 0, 0, 0, 7, 7}, NULL},       {{0, 0, 0, 0x3fffffff, 0, 0}, NULL},
        {{-.5f, 0, 0, 0, 0, 0}, "target"},   {{1, 0, 0, 0, 0, 0}, "target"},
        {{97, 0, 0, 0, 0, 0}, "target"},     {{.005f, 0, 0, 0, 0, 0}, "target"},
        {{0, -2, 0, 0, 0, 0}, "cooldown"},   {{0, 1001, 0, 0, 0, 0}, "cooldown"},
        {{0, 0, -1, 0, 0, 0}, "min_hot"},    {{0, 0, 64, 63, 0, 0}, "min_hot"},
        {{0, 0, 0, -1, 0, 0}, "min_hot"},    {{0, 0, 0, 0x40000000, 0, 0}, "min_hot"},
        {{0, 0, 0, 0, -1, 0}, "min_level"},  {{0, 0, 0, 0, 3, 2}, "min_level"},
        {{0, 0, 0, 0, 1, TKV_OFF}, "level"}, {{0, 0, 0, 0, 0, 8}, "max_level"},
        {{0, 0, 0, 0, 0, -2}, "max_level"},  {{0, 0, 0, 0, 8, 0}, "max_level"},
    };
    tkv_feedback f = make_controller(NULL), before;
    tkv_feedback_config cfg;
    char reason[200];
    int i;
    for (i = 0; i < COUNT(cases); i++) {
        before = f;
        if (!cases[i].reason_has) {
            f = make_controller(&cases[i].cfg);
            continue;
        }
        CHECK_EQ(tkv_init_feedback(&f, &cases[i].cfg, reason, sizeof reason), TKV_ERR_CONFIG);
        CHECK_MSG(strstr(reason, cases[i].reason_has) != NULL, "case %d: %s", i, reason);
        CHECK_EQ(tkv_init_feedback(&f, &cases[i].cfg, NULL, 0), TKV_ERR_CONFIG);
        CHECK_MEM(&f, &before, sizeof f);
    }
    memset(&cfg, 0, sizeof cfg);
    for (i = 0; i < COUNT(NONFINITE); i++) {
        cfg.target = tkv_test_float(NONFINITE[i]);
        CHECK_EQ(tkv_init_feedback(&f, &cfg, reason, sizeof reason), TKV_ERR_CONFIG);
    }
}

TEST(reset) {
    tkv_feedback f = make_controller(NULL), fresh = make_controller(NULL);
    tkv_feedback_info i;
    observe_times(&f, .5, 1234);
    (void)tkv_observe_score(&f, 2);
    CHECK_EQ(get_advice(&f, 64, 3).kind, TKV_ADVICE_FINER);
    restart_controller(&f, NULL);
    CHECK_MEM(&f, &fresh, sizeof f);
    i = get_info(&f, 0);
    CHECK(i.n == 0 && i.scores == 0 && i.refused == 0 && i.finer == 0 && i.cheaper == 0);
    CHECK_EQ(get_advice(&f, 64, 2).samples, 0);
    observe_times(&f, .99, 16);
    observe_times(&fresh, .99, 16);
    CHECK_EQ(get_advice(&f, 64, 2).kind, get_advice(&fresh, 64, 2).kind);
    CHECK_NEAR(get_info(&f, 0).average, get_info(&fresh, 0).average, 0);
}

int main(int argc, char **argv) {
    tkv_test_begin(argc, argv);
    RUN(scores_from_ppl);
    RUN(scores_from_accuracy);
    RUN(scores_from_quality);
    RUN(scores_of_nonfinite_numbers);
    RUN(advises_nothing_before_16_scores);
    RUN(advises_finer_below_the_target);
    RUN(advises_cheaper_above_the_target);
    RUN(keeps_the_plan_between);
    RUN(newest_scores_at_the_limit_keep_the_plan);
    RUN(targets);
    RUN(needs_significant_scores);
    RUN(newest_scores_count);
    RUN(limits);
    RUN(beyond_limits);
    RUN(hot_tokens);
    RUN(cooldown_after_a_change);
    RUN(old_scores_do_not_count);
    RUN(plan_changed_without_advice);
    RUN(remembers_the_gain);
    RUN(report_by_hand);
    RUN(report_against_sums);
    RUN(stable_and_improving);
    RUN(converges);
    RUN(does_not_swing);
    RUN(becomes_cheap_again);
    RUN(time_of_a_score);
    RUN(refuses_bad_calls);
    RUN(configs);
    RUN(reset);
    return tkv_test_end();
}
