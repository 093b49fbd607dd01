/*
 * test_policy.c - the pressure controller: levels computed by hand, reported numbers, refused configs, threads.
 *
 * The first half has the cases of the original design, and two faults that it had: one idle sample lowered the
 * level by two, and a NaN froze the controller.
 */
#include "kit.h"

#if !defined(__wasm__)
#include <pthread.h>
#endif

static tkv_pressure make_pressure(const tkv_pressure_config *cfg) {
    tkv_pressure p;
    char reason[200] = "x";
    const tkv_status st = tkv_init_pressure(&p, cfg, reason, sizeof reason);
    CHECK_MSG(st == TKV_OK, "%s", reason);
    CHECK_STR(reason, "");
    return p;
}

static tkv_pressure_config make_profile_config(tkv_pressure_profile profile) {
    tkv_pressure_config cfg;
    memset(&cfg, 0, sizeof cfg);
    cfg.profile = profile;
    return cfg;
}

static tkv_pressure make_profile(tkv_pressure_profile profile) {
    const tkv_pressure_config cfg = make_profile_config(profile);
    return make_pressure(&cfg);
}

/* Starts a controller again. */
static void restart_pressure(tkv_pressure *p, const tkv_pressure_config *cfg) {
    CHECK_EQ(tkv_init_pressure(p, cfg, NULL, 0), TKV_OK);
}

static int observe_times(tkv_pressure *p, double pressure, int times) {
    int level = -1;
    while (times--) level = tkv_observe_pressure(p, (float)pressure);
    return level;
}

static tkv_pressure_info get_info(tkv_pressure *p) {
    tkv_pressure_info i;
    CHECK_EQ(tkv_get_pressure(p, &i), TKV_OK);
    return i;
}

/* >>the cases of the design */
TEST(starts_at_level_0) {
    tkv_pressure p = make_pressure(NULL);
    tkv_pressure_info i = get_info(&p);
    CHECK_EQ(i.level, 0);
    CHECK_EQ(i.samples, 0);
    CHECK_EQ(i.average, 0);
    CHECK_EQ(i.samples_left, -1);
    CHECK_EQ(observe_times(&p, .6, 1), 0);
    CHECK_EQ(observe_times(&p, .92, 20), 1);
}

TEST(low_pressure_stays_at_level_0) {
    tkv_pressure p = make_profile(TKV_PROFILE_DEFAULT);
    CHECK_EQ(observe_times(&p, .3, 100), 0);
    CHECK_EQ(get_info(&p).tightened, 0);
}

TEST(levels_rise_fall_and_are_counted) {
    tkv_pressure p = make_profile(TKV_PROFILE_DEFAULT);
    CHECK_EQ(observe_times(&p, .85, 40), 1);
    CHECK_EQ(observe_times(&p, .98, 40), 2);
    CHECK_EQ(get_info(&p).tightened, 2);
    CHECK_EQ(get_info(&p).relaxed, 0);
    CHECK_EQ(observe_times(&p, .93, 40), 2); /* above .95 - .05 */
    CHECK_EQ(observe_times(&p, .05, 200), 0);
    CHECK_EQ(get_info(&p).relaxed, 2);
    CHECK_EQ(get_info(&p).samples, 320);
}

TEST(does_not_flap) {
    tkv_pressure p = make_profile(TKV_PROFILE_DEFAULT);
    tkv_pressure_info i;
    int n;
    for (n = 0; n < 200; n++) observe_times(&p, n % 2 ? .82 : .78, 1);
    i = get_info(&p);
    CHECK_LE(i.tightened + i.relaxed, 1);
}

TEST(relaxes_one_level_at_a_time) {
    tkv_pressure p = make_profile(TKV_PROFILE_DEFAULT);
    CHECK_EQ(observe_times(&p, .98, 40), 2);
    CHECK_EQ(observe_times(&p, 0, 1), 1); /* average .784: below .90, not below .75 */
    CHECK_EQ(observe_times(&p, 0, 1), 0); /* .627 */
}

TEST(first_sample_sets_the_average) {
    tkv_pressure p = make_profile(TKV_PROFILE_DEFAULT);
    CHECK_EQ(observe_times(&p, .97, 1), 2);
    CHECK_NEAR(get_info(&p).average, .97, 1e-6);
    observe_times(&p, .47, 1);
    CHECK_NEAR(get_info(&p).average, .97 - .2 * .5, 1e-6);
}

TEST(profiles) {
    tkv_pressure p = make_profile(TKV_PROFILE_FP16_ONLY);
    tkv_pressure_config cfg;
    int i;
    CHECK_EQ(observe_times(&p, 1, 100), 0);
    CHECK_EQ(p.cfg.max_level, 0);
    p = make_profile(TKV_PROFILE_AGGRESSIVE);
    CHECK_EQ(get_info(&p).level, 1);
    CHECK_EQ(observe_times(&p, 0, 50), 1); /* never below min_level */
    CHECK_EQ(observe_times(&p, .95, 30), 2);
    CHECK_NEAR(p.cfg.alpha, .3, 1e-6);
    CHECK_NEAR(p.cfg.threshold[0], .5, 1e-6);
    CHECK_NEAR(p.cfg.threshold[1], .8, 1e-6);
    CHECK_NEAR(p.cfg.hysteresis, .05, 1e-6);
    p = make_profile(TKV_PROFILE_DEFAULT);
    CHECK_NEAR(p.cfg.threshold[0], .8f, 0);
    CHECK_NEAR(p.cfg.threshold[1], .95f, 0);
    CHECK_NEAR(p.cfg.threshold[2], 0, 0);
    CHECK_NEAR(p.cfg.hysteresis, .05f, 0);
    CHECK_NEAR(p.cfg.alpha, .2f, 0);
    CHECK_EQ(p.cfg.min_level, 0);
    CHECK_EQ(p.cfg.max_level, 2);
    for (i = 0; i < TKV_PROFILE_COUNT; i++) { /* tkv_find_name reverses tkv_get_name */
        int found = -1;
        const char *name = tkv_get_name(TKV_NAME_PROFILE, i);
        REQUIRE(name != NULL);
        CHECK_EQ(tkv_find_name(TKV_NAME_PROFILE, name, &found), TKV_OK);
        CHECK_EQ(found, i);
        CHECK_EQ(tkv_find_name(TKV_NAME_PROFILE, "best", &found), TKV_ERR_RANGE);
        CHECK_EQ(tkv_find_name(TKV_NAME_PROFILE, NULL, &found), TKV_ERR_ARG);
        CHECK_EQ(found, i);
    }
    CHECK_STR(tkv_get_name(TKV_NAME_PROFILE, TKV_PROFILE_FP16_ONLY), "fp16_only");
    CHECK_STR(tkv_get_name(TKV_NAME_PROFILE, TKV_PROFILE_AGGRESSIVE), "aggressive");
    CHECK(!tkv_get_name(TKV_NAME_PROFILE, TKV_PROFILE_COUNT));
    CHECK(!tkv_get_name(TKV_NAME_PROFILE, -1));
    cfg = make_profile_config(TKV_PROFILE_COUNT);
    CHECK_EQ(tkv_init_pressure(&p, &cfg, NULL, 0), TKV_ERR_CONFIG);
    CHECK_EQ(tkv_compute_level(&cfg, 1, 1), 0);
}

/* Fields that are set replace the profile's values; the others keep them. */
TEST(profiles_fill_fields_of_0) {
    tkv_pressure_config cfg = make_profile_config(TKV_PROFILE_AGGRESSIVE);
    tkv_pressure p;
    cfg.alpha = .5f;
    p = make_pressure(&cfg);
    CHECK_NEAR(p.cfg.alpha, .5f, 0);
    CHECK_NEAR(p.cfg.threshold[0], .5f, 0);
    CHECK_EQ(p.cfg.min_level, 1);
    CHECK_EQ(p.cfg.max_level, 2);
    cfg.alpha = 0;
    cfg.threshold[0] = .6f;
    cfg.threshold[1] = .7f;
    cfg.threshold[2] = .9f;
    p = make_pressure(&cfg);
    CHECK_NEAR(p.cfg.alpha, .3f, 0);
    CHECK_NEAR(p.cfg.threshold[1], .7f, 0);
    CHECK_EQ(p.cfg.max_level, 3);
    CHECK_EQ(get_info(&p).level, 1);
    CHECK_EQ(observe_times(&p, 1, 1), 3);
    cfg.min_level = cfg.max_level = 2;
    p = make_pressure(&cfg);
    CHECK_EQ(get_info(&p).level, 2);
    CHECK_EQ(observe_times(&p, 1, 9), 2);
    cfg = make_profile_config(TKV_PROFILE_FP16_ONLY);
    cfg.max_level = 1; /* replaces the profile's limit */
    p = make_pressure(&cfg);
    CHECK_EQ(observe_times(&p, 1, 9), 1);
    cfg = make_profile_config(TKV_PROFILE_AGGRESSIVE);
    cfg.max_level = TKV_OFF; /* below the profile's first level */
    CHECK_EQ(tkv_init_pressure(&p, &cfg, NULL, 0), TKV_ERR_CONFIG);
}

TEST(samples_are_clamped_or_refused) {
    tkv_pressure p = make_profile(TKV_PROFILE_DEFAULT);
    CHECK_EQ(observe_times(&p, -1, 1), 0);
    CHECK_EQ(get_info(&p).average, 0);
    observe_times(&p, 2, 1);
    CHECK_NEAR(get_info(&p).average, .2, 1e-6);
    CHECK_EQ(tkv_observe_pressure(&p, tkv_test_float(0x7fc00000u)), 0);
    CHECK_EQ(tkv_observe_pressure(&p, tkv_test_float(0x7f800000u)), 0);
    CHECK_EQ(tkv_observe_pressure(&p, tkv_test_float(0xff800000u)), 0);
    CHECK_NEAR(get_info(&p).average, .2, 1e-6);
    CHECK_EQ(get_info(&p).samples, 2);
    CHECK_EQ(get_info(&p).refused, 3);
    CHECK_EQ(observe_times(&p, 1, 60), 2); /* in the original design a NaN froze the level */
}

TEST(init_restarts) {
    const tkv_pressure_config cfg = make_profile_config(TKV_PROFILE_AGGRESSIVE);
    tkv_pressure p = make_pressure(&cfg), fresh = make_pressure(&cfg);
    observe_times(&p, .99, 50);
    CHECK_EQ(get_info(&p).level, 2);
    restart_pressure(&p, &cfg);
    CHECK_MEM(&p, &fresh, sizeof p);
    CHECK_EQ(get_info(&p).level, 1);
    CHECK_EQ(get_info(&p).samples, 0);
    CHECK_EQ(observe_times(&p, .6, 1), observe_times(&fresh, .6, 1));
    CHECK_NEAR(get_info(&p).average, get_info(&fresh).average, 0);
}

/* >>the rule: levels computed by hand */
TEST(level_rule) {
    tkv_pressure_config cfg = make_profile_config(TKV_PROFILE_DEFAULT);
    static const struct {
        double average;
        int from, to;
    } cases[] = {{.79, 0, 0}, {.80, 0, 1}, {.95, 0, 2}, {1.0, 0, 2}, {.94, 1, 1}, {.95, 1, 2}, {.76, 1, 1},
                 {.74, 1, 0}, {.0, 1, 0},  {.91, 2, 2}, {.89, 2, 1}, {.0, 2, 1},  {.0, 7, 1},  {1.0, -3, 2}};
    size_t i;
    for (i = 0; i < sizeof cases / sizeof *cases; i++)
        CHECK_MSG(tkv_compute_level(&cfg, (float)cases[i].average, cases[i].from) == cases[i].to,
                  "%.2f from %d", cases[i].average, cases[i].from);
    CHECK_EQ(tkv_compute_level(&cfg, tkv_test_float(0x7fc00000u), 1), 1);
    cfg.alpha = 2;
    CHECK_EQ(tkv_compute_level(&cfg, 1, 1), 0);
    CHECK_EQ(tkv_compute_level(NULL, 1, 1), 0);
}

/* Seven thresholds; random pressures are compared with a plain simulation of the controller. */
TEST(long_ladders) {
    tkv_pressure_config cfg;
    tkv_rng r = tkv_rng_seed(5);
    tkv_pressure p;
    double average = 0, goal = 0;
    int level = 1, n, i, n_moves = 0;
    memset(&cfg, 0, sizeof cfg);
    for (i = 0; i < 7; i++) cfg.threshold[i] = (float)(.3 + .1 * i);
    cfg.hysteresis = .07f;
    cfg.alpha = .4f;
    cfg.min_level = 1;
    cfg.max_level = 6;
    p = make_pressure(&cfg);
    for (n = 0; n < 20000; n++) {
        double x, is_near_border = 0;
        if (n % 50 == 0) goal = tkv_rng_uniform(&r);
        x = goal + .2 * tkv_rng_uniform(&r) - .1;
        x = (double)(float)(x < 0 ? 0 : x > 1 ? 1 : x);
        average = n ? average + (double).4f * (x - average) : x;
        for (i = 0; i < 7; i++) { /* too near a border for float arithmetic: restart instead */
            double d = average - (double)cfg.threshold[i], e = d + (double).07f;
            is_near_border = d * d < 1e-10 || e * e < 1e-10 ? 1 : is_near_border;
        }
        if (is_near_border > 0) {
            restart_pressure(&p, &cfg);
            average = x, level = 1;
            tkv_observe_pressure(&p, (float)x);
            level = get_info(&p).level;
            continue;
        }
        {
            int next = level;
            while (next < 7 && average >= (double)cfg.threshold[next]) next++;
            if (next == level && average < (double)cfg.threshold[next - 1] - (double).07f) next--;
            next = next < 1 ? 1 : next > 6 ? 6 : next;
            n_moves += next != level;
            level = next;
        }
        CHECK_EQ(tkv_observe_pressure(&p, (float)x), level);
    }
    CHECK_LE(1000, n_moves);
}

/* With `jump`, a pressure two or more levels above the present one is taken at once. Averages by hand, alpha .2. */
TEST(jumps_of_levels) {
    static const struct {
        double pressure, average, slow_average;
        int level, slow_level;
    } samples[] = {{.30, .30, .30, 0, 0},
                   {.55, .35, .35, 0, 0},         /* calls for level 1, one above */
                   {.62, .62, .404, 2, 0},        /* level 2, two above: a jump */
                   {.75, .646, .4732, 2, 0},      /* level 3, one above */
                   {.95, .95, .56856, 5, 1},      /* level 5, three above */
                   {.30, .82, .514848, 4, 1},     /* falls by one: below .9 - .05 */
                   {.30, .716, .4718784, 3, 1},   /* below .8 - .05 */
                   {.70, .7128, .51750272, 3, 1}, /* not below .7 - .05 */
                   {.62, .69424, .538002176, 3, 1},
                   {.40, .635392, .5104017408, 2, 1},
                   {.58, .6243136, .52432139264, 2, 1},
                   {1.0, 1.0, .619457114112, 5, 2}};
    tkv_pressure_config cfg;
    tkv_pressure p, slow;
    char reason[200];
    int i;
    memset(&cfg, 0, sizeof cfg);
    for (i = 0; i < 5; i++) cfg.threshold[i] = (float)(.5 + .1 * i);
    slow = make_pressure(&cfg);
    cfg.jump = 1;
    p = make_pressure(&cfg);
    for (i = 0; i < (int)(sizeof samples / sizeof *samples); i++) {
        CHECK_EQ(tkv_observe_pressure(&p, (float)samples[i].pressure), samples[i].level);
        CHECK_NEAR(get_info(&p).average, samples[i].average, 1e-6);
        CHECK_EQ(tkv_observe_pressure(&slow, (float)samples[i].pressure), samples[i].slow_level);
        CHECK_NEAR(get_info(&slow).average, samples[i].slow_average, 1e-6);
    }
    CHECK_EQ(get_info(&p).tightened, 2 + 3 + 3);
    CHECK_EQ(get_info(&p).relaxed, 3);
    CHECK_EQ(get_info(&p).level, 5);
    CHECK_EQ(observe_times(&p, 0, 1), 4); /* no jump downward */
    CHECK_NEAR(get_info(&p).average, .8, 1e-6);
    CHECK_EQ(tkv_observe_pressure(&p, tkv_test_float(0x7f800000u)), 4);
    cfg.max_level = 1; /* one level above is no jump, whatever lies behind */
    restart_pressure(&p, &cfg);
    CHECK_EQ(observe_times(&p, .1, 1), 0);
    CHECK_EQ(observe_times(&p, 1, 1), 0);
    CHECK_NEAR(get_info(&p).average, .28, 1e-6);
    cfg.max_level = 2;
    restart_pressure(&p, &cfg);
    CHECK_EQ(observe_times(&p, .1, 1), 0);
    CHECK_EQ(observe_times(&p, 1, 1), 2);
    cfg.jump = 2;
    CHECK_EQ(tkv_init_pressure(&p, &cfg, reason, sizeof reason), TKV_ERR_CONFIG);
    CHECK_STR(reason, "jump must be 0 or 1");
    cfg.jump = -1;
    CHECK_EQ(tkv_init_pressure(&p, &cfg, NULL, 0), TKV_ERR_CONFIG);
}

TEST(forecast) {
    tkv_pressure p = make_profile(TKV_PROFILE_DEFAULT);
    int n;
    for (n = 0; n < 200; n++) observe_times(&p, .001 * n, 1);
    CHECK_NEAR(get_info(&p).trend, .001, 1e-5);
    CHECK_NEAR(get_info(&p).samples_left, 801, 10);
    CHECK_NEAR(get_info(&p).peak, .199, 1e-6);
    observe_times(&p, .1, 300);
    CHECK_EQ(get_info(&p).samples_left, -1); /* the pressure has fallen or stays */
    CHECK_NEAR(get_info(&p).peak, .199, 1e-6);
    CHECK_NEAR(get_info(&p).last, .1, 1e-6);
}

/* TKV_ZERO is 0 where 0 is the default. */
TEST(tkv_zero_means_0) {
    tkv_pressure_config cfg, filled;
    tkv_pressure p, q;
    char reason[200];
    int i;
    memset(&cfg, 0, sizeof cfg);
    cfg.alpha = 1.0f;
    for (i = 0; i < 2; i++) { /* default hysteresis, then 0 */
        cfg.hysteresis = i ? TKV_ZERO : 0.0f;
        CHECK_EQ(tkv_init_pressure(&p, &cfg, reason, sizeof reason), TKV_OK);
        CHECK_EQ(tkv_observe_pressure(&p, .81f), 1);
        CHECK_EQ(tkv_observe_pressure(&p, .79f), i ? 0 : 1); /* with the default, level 1 lasts down to .75 */
        CHECK_EQ(tkv_observe_pressure(&p, .80f), 1);
        CHECK_EQ(tkv_observe_pressure(&p, .74f), 0);
        CHECK_EQ(tkv_compute_level(&cfg, .79f, 1), i ? 0 : 1);
        filled = p.cfg; /* a filled config fills to itself */
        CHECK_EQ(tkv_init_pressure(&q, &filled, reason, sizeof reason), TKV_OK);
        CHECK_MEM(&q.cfg, &p.cfg, sizeof p.cfg);
    }
    cfg.hysteresis = 0.0f;
    cfg.threshold[0] = TKV_ZERO;
    cfg.threshold[1] = .5f;
    CHECK_EQ(tkv_init_pressure(&p, &cfg, reason, sizeof reason), TKV_OK);
    CHECK_EQ(tkv_observe_pressure(&p, 0.0f), 1); /* threshold 0: level 1 at any pressure */
    CHECK_EQ(tkv_observe_pressure(&p, .6f), 2);
    CHECK_EQ(tkv_observe_pressure(&p, .46f), 2);
    CHECK_EQ(tkv_observe_pressure(&p, 0.0f), 1);
    CHECK_EQ(tkv_observe_pressure(&p, 0.0f), 1);
    cfg.hysteresis = .5f; /* must be less than the first threshold above 0 */
    CHECK_EQ(tkv_init_pressure(&p, &cfg, reason, sizeof reason), TKV_ERR_CONFIG);
    CHECK(strstr(reason, "TKV_ZERO") != NULL);
    cfg.hysteresis = .49f;
    CHECK_EQ(tkv_init_pressure(&p, &cfg, reason, sizeof reason), TKV_OK);
    cfg.threshold[1] = 0.0f;
    cfg.threshold[2] = .5f; /* a gap */
    CHECK_EQ(tkv_init_pressure(&p, &cfg, reason, sizeof reason), TKV_ERR_CONFIG);
    memset(&cfg, 0, sizeof cfg);
    cfg.alpha = TKV_ZERO; /* alpha does not accept TKV_ZERO */
    CHECK_EQ(tkv_init_pressure(&p, &cfg, reason, sizeof reason), TKV_ERR_CONFIG);
}

TEST(bad_configs) {
    static const struct {
        float threshold[3], hysteresis, alpha;
        int min_level, max_level;
        const char *word;
    } bad[] = {{{.9f, .8f, 0}, 0, 0, 0, 0, "rise"},        {{.5f, 1.5f, 0}, 0, 0, 0, 0, "thresholds"},
               {{-.5f, 0, 0}, 0, 0, 0, 0, "thresholds"},   {{.5f, 0, .7f}, 0, 0, 0, 0, "gaps"},
               {{0, .7f, 0}, 0, 0, 0, 0, "gaps"},          {{0, 0, 0}, .8f, 0, 0, 0, "hysteresis"},
               {{0, 0, 0}, -.1f, 0, 0, 0, "hysteresis"},   {{0, 0, 0}, 0, -1, 0, 0, "alpha"},
               {{0, 0, 0}, 0, 1.5f, 0, 0, "alpha"},        {{0, 0, 0}, 0, 0, 3, 0, "min_level"},
               {{0, 0, 0}, 0, 0, 0, 3, "max_level"},       {{0, 0, 0}, 0, 0, 2, 1, "min_level"},
               {{0, 0, 0}, 0, 0, 1, TKV_OFF, "min_level"}, {{0, 0, 0}, 0, 0, -1, 0, "min_level"},
               {{0, 0, 0}, 0, 0, 0, -2, "max_level"}};
    tkv_pressure p = make_profile(TKV_PROFILE_DEFAULT), before = p;
    tkv_pressure_config cfg;
    tkv_pressure_info info;
    char reason[200];
    int i;
    for (i = 0; i < COUNT(bad); i++) {
        memset(&cfg, 0, sizeof cfg);
        memcpy(cfg.threshold, bad[i].threshold, sizeof bad[i].threshold);
        cfg.hysteresis = bad[i].hysteresis;
        cfg.alpha = bad[i].alpha;
        cfg.min_level = bad[i].min_level;
        cfg.max_level = bad[i].max_level;
        CHECK_EQ(tkv_init_pressure(&p, &cfg, reason, sizeof reason), TKV_ERR_CONFIG);
        CHECK_MSG(strstr(reason, bad[i].word) != NULL, "case %d: %s", i, reason);
        CHECK_EQ(tkv_init_pressure(&p, &cfg, NULL, 0), TKV_ERR_CONFIG);
    }
    for (i = 0; i < 9; i++) { /* a NaN in any number */
        memset(&cfg, 0, sizeof cfg);
        cfg.threshold[0] = .5f;
        if (i < 7) cfg.threshold[i] = tkv_test_float(0x7fc00000u);
        if (i == 7) cfg.hysteresis = tkv_test_float(0x7fc00000u);
        if (i == 8) cfg.alpha = tkv_test_float(0x7fc00000u);
        CHECK_EQ(tkv_init_pressure(&p, &cfg, NULL, 0), TKV_ERR_CONFIG);
    }
    CHECK_MEM(&p, &before, sizeof p);
    CHECK_EQ(tkv_init_pressure(NULL, NULL, reason, sizeof reason), TKV_ERR_ARG);
    CHECK_EQ(tkv_observe_pressure(NULL, 1), 0);
    CHECK_EQ(tkv_get_pressure(NULL, NULL), TKV_ERR_ARG);
    CHECK_EQ(tkv_init_pressure(&p, NULL, NULL, 0), TKV_OK);
    CHECK_EQ(tkv_get_pressure(&p, NULL), TKV_ERR_ARG);
    CHECK_EQ(tkv_get_pressure(NULL, &info), TKV_ERR_ARG);
}

/* >>threads */
#if !defined(__wasm__)
enum { THREADS = 8, SAMPLES = 20000 };

static void *observe_random_pressures(void *arg) {
    tkv_pressure *p = (tkv_pressure *)arg;
    tkv_rng r = tkv_rng_seed(9);
    int n;
    for (n = 0; n < SAMPLES; n++) tkv_observe_pressure(p, (float)tkv_rng_uniform(&r) * .4f + .6f);
    return NULL;
}
#endif

TEST(threads) {
#if defined(__wasm__)
    SKIP("no threads");
#else
    NEEDS_ATOMICS;
    tkv_pressure p = make_profile(TKV_PROFILE_DEFAULT);
    tkv_pressure_info i;
    pthread_t t[THREADS];
    int n;
    for (n = 0; n < THREADS; n++) CHECK_EQ(pthread_create(&t[n], NULL, observe_random_pressures, &p), 0);
    for (n = 0; n < 1000; n++) { /* each snapshot is consistent */
        i = get_info(&p);
        if ((int64_t)i.tightened - (int64_t)i.relaxed != i.level) break;
    }
    CHECK_EQ(n, 1000);
    for (n = 0; n < THREADS; n++) CHECK_EQ(pthread_join(t[n], NULL), 0);
    i = get_info(&p);
    CHECK_EQ(i.samples, (uint64_t)THREADS * SAMPLES);
    CHECK_EQ((int64_t)i.tightened - (int64_t)i.relaxed, i.level);
    CHECK(i.tightened > 0);
#endif
}

int main(int argc, char **argv) {
    tkv_test_begin(argc, argv);
    RUN(starts_at_level_0);
    RUN(low_pressure_stays_at_level_0);
    RUN(levels_rise_fall_and_are_counted);
    RUN(does_not_flap);
    RUN(relaxes_one_level_at_a_time);
    RUN(first_sample_sets_the_average);
    RUN(profiles);
    RUN(profiles_fill_fields_of_0);
    RUN(samples_are_clamped_or_refused);
    RUN(init_restarts);
    RUN(level_rule);
    RUN(long_ladders);
    RUN(jumps_of_levels);
    RUN(forecast);
    RUN(tkv_zero_means_0);
    RUN(bad_configs);
    RUN(threads);
    return tkv_test_end();
}
