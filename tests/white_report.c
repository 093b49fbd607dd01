/*
 * white_report.c - white-box test of src/report: the tables of config fields and of metrics, and fields of a config
 * that this test defines.
 *
 * It calls internal functions (white.h).
 */
#include "white.h"
#include "kit.h"

enum { REASON = 200 };

/* >>the tables of fields */
/* Every byte of a struct must belong to a row, to a field without a text form, or to padding before a larger field.
 * covered: 1 for bytes of fields without a text form. */
static void check_covered(const char *name, uint8_t *covered, size_t size, const tkvi_row *row, int n) {
    size_t i, start;
    int k;
    for (k = 0; k < n; k++)
        for (i = 0; i < row[k].size; i++) CHECK_EQ(covered[row[k].offset + i]++, 0);
    for (i = 0; i < size;) {
        for (start = i; i < size && !covered[i];) i++;
        CHECK_MSG(i == start || (i - start < sizeof(void *) && i % sizeof(void *) == 0),
                  "%s has bytes without a row at %lu", name, (unsigned long)start);
        while (i < size && covered[i]) i++;
    }
}

TEST(every_field_has_a_row) {
    uint8_t covered[sizeof(tkv_config)];
    int i;
#define COVER(field) memset(covered + offsetof(tkv_config, field), 1, sizeof(((tkv_config *)0)->field))
    memset(covered, 0, sizeof covered);
    COVER(start_canary);
    COVER(end_canary);
    COVER(model.rope); /* these have tables of their own */
    COVER(layers);
    COVER(budget.ladder);
    COVER(budget.pressure);
    COVER(evict);
    COVER(importance);
    COVER(promotion);
    COVER(offload);
    COVER(recompute);
    COVER(host.on_event);
    COVER(host.event_user);
    COVER(host.allocator);
    COVER(host.parallel_for);
    COVER(host.parallel_user);
    COVER(format);
    for (i = 0; i < COUNT(tkvi_later_rows); i++)
        memset(covered + tkvi_later_rows[i].offset, 1, tkvi_later_rows[i].size);
    check_covered("tkv_config", covered, sizeof(tkv_config), tkvi_config_rows, COUNT(tkvi_config_rows));
    memset(covered, 0, sizeof covered);
    check_covered("tkv_format_options", covered, sizeof(tkv_format_options), tkvi_option_rows,
                  COUNT(tkvi_option_rows));
    memset(covered, 0, sizeof covered);
    check_covered("tkv_rope", covered, sizeof(tkv_rope), tkvi_rope_rows, COUNT(tkvi_rope_rows));
    memset(covered, 0, sizeof covered);
    check_covered("tkv_layer_config", covered, sizeof(tkv_layer_config), tkvi_layer_rows,
                  COUNT(tkvi_layer_rows));
    memset(covered, 0, sizeof covered);
    check_covered("tkv_pressure_config", covered, sizeof(tkv_pressure_config), tkvi_pressure_rows,
                  COUNT(tkvi_pressure_rows));
    memset(covered, 0, sizeof covered);
    memset(covered + offsetof(tkv_evict_config, scorer), 1,
           2 * sizeof(void *)); /* the scorer and its user pointer */
    check_covered("tkv_evict_config", covered, sizeof(tkv_evict_config), tkvi_evict_config_rows,
                  COUNT(tkvi_evict_config_rows));
    memset(covered, 0, sizeof covered);
    memset(covered, 1, offsetof(tkv_offload_config, keep_exact)); /* callbacks and their user pointer */
    check_covered("tkv_offload_config", covered, sizeof(tkv_offload_config), tkvi_offload_rows,
                  COUNT(tkvi_offload_rows));
    memset(covered, 0, sizeof covered);
    check_covered("tkv_importance_config", covered, sizeof(tkv_importance_config), tkvi_importance_rows,
                  COUNT(tkvi_importance_rows));
    memset(covered, 0, sizeof covered);
    check_covered("tkv_promotion_config", covered, sizeof(tkv_promotion_config), tkvi_promotion_rows,
                  COUNT(tkvi_promotion_rows));
    memset(covered, 0, sizeof covered);
    check_covered("tkv_level", covered, sizeof(tkv_level), tkvi_level_rows, COUNT(tkvi_level_rows));
}

TEST(values_of_rows_have_public_names) {
    static const struct {
        const char *key;
        tkv_name_kind names;
        int n;
    } of[] = {{"host.isa", TKV_NAME_ISA, TKV_ISA_COUNT},
              {"evict.policy", TKV_NAME_EVICT_POLICY, TKV_EVICT_COUNT},
              {"importance.strategy", TKV_NAME_IMPORTANCE, TKV_IMPORTANCE_COUNT},
              {"budget.pressure.profile", TKV_NAME_PROFILE, TKV_PROFILE_COUNT}};
    char line[80], said[80];
    int i, value;
    for (i = 0; i < COUNT(of); i++)
        for (value = 0; value < of[i].n; value++) {
            tkv_config cfg = tkv_default_config();
            snprintf(line, sizeof line, "%s = %s\n", of[i].key, tkv_get_name(of[i].names, value));
            CHECK_EQ(tkv_parse_config(&cfg, NULL, line, strlen(line), NULL, 0), TKV_OK);
            CHECK_EQ(tkv_print_config(&cfg, 0, said, sizeof said, NULL), TKV_OK);
            CHECK_STR(said, value ? line : "");
        }
}

/* A small config of this test: sizes, lists of floats, names, format pairs, lengths and a list of structs. */
typedef struct small_level {
    char name[8];
    tkv_format_pair warm;
    int hot_tokens;
} small_level;

typedef struct small_config {
    size_t bytes;
    float list[3];
    small_level level[4];
    tkv_pressure_config pressure;
} small_config;

static const tkvi_row small_rows[] = {TKVI_ROW(small_config, bytes, TKVI_SIZE, NULL),
                                      TKVI_ROW(small_config, list, TKVI_FLOATS, NULL)};
static const tkvi_row small_level_rows[] = {TKVI_ROW(small_level, name, TKVI_NAME, NULL),
                                            TKVI_ROW(small_level, warm, TKVI_PAIR, NULL),
                                            TKVI_ROW(small_level, hot_tokens, TKVI_INT, tkvi_words_length)};
static const tkvi_fields small_fields[] = {
    {NULL, 0, 0, 0, TKVI_ROWS_OF(small_rows)},
    {"level", 4, offsetof(small_config, level), sizeof(small_level), TKVI_ROWS_OF(small_level_rows)},
    {"budget.pressure", 0, offsetof(small_config, pressure), 0, TKVI_ROWS_OF(tkvi_pressure_rows)}};

static tkv_status parse_small_config(small_config *m, const char *text, char *reason) {
    tkvi_parser p;
    int pass;
    tkv_status st = TKV_OK;
    tkvi_parse_begin(&p, small_fields, 3, m, text, strlen(text), reason, REASON);
    for (pass = TKVI_CHECK; pass <= TKVI_TAKE && !st; pass++) st = tkvi_parse_all(&p, pass);
    return st;
}

static void write_small_config(tkvi_out *o, const void *what) {
    const small_config *m = (const small_config *)what;
    int i;
    tkvi_write_fields(o, &small_fields[0], 0, m);
    for (i = 0; i < 4; i++) tkvi_write_fields(o, &small_fields[1], i, m->level);
    tkvi_write_fields(o, &small_fields[2], 0, &m->pressure);
}

TEST(fields_of_a_small_config) {
    static const struct {
        const char *text;
        uint64_t bytes;
    } sizes[] = {{"0", 0},           {"65536", 65536},     {"512K", 512 << 10}, {"512KiB", 512 << 10},
                 {"64M", 64 << 20},  {"64 MiB", 64 << 20}, {"1G", 1 << 30},     {"1.5G", 3u << 29},
                 {"0.25M", 1 << 18}, {"0.3333K", 341}};
    static const char *const bad[] = {"-1",  "K",   "1KB",   "1k",  "1.5",       "1.55555K",
                                      "1iB", "1GG", "1..5G", ".5G", "99999999T", "99999999999999999999",
                                      "1.xG"};
    small_config m, back;
    char reason[REASON], text[600], line[64];
    size_t i;
    for (i = 0; i < sizeof sizes / sizeof *sizes; i++) {
        memset(&m, 0, sizeof m);
        snprintf(line, sizeof line, "bytes = %s", sizes[i].text);
        CHECK_MSG(parse_small_config(&m, line, reason) == TKV_OK, "%s", reason);
        CHECK_EQ(m.bytes, sizes[i].bytes);
    }
    for (i = 0; i < sizeof bad / sizeof *bad; i++) {
        snprintf(line, sizeof line, "bytes = %s", bad[i]);
        CHECK_MSG(parse_small_config(&m, line, reason) == TKV_ERR_CONFIG &&
                      strstr(reason, "it must be bytes, such as"),
                  "%s: %s", bad[i], reason);
    }
    memset(&m, 0, sizeof m);
    CHECK_MSG(parse_small_config(
                  &m,
                  "bytes = 2G\nlist = 0, .5, -2\nlevel[0].name = f16\nlevel[0].hot_tokens = unlimited\n"
                  "level[1-3].warm = a40/r40\nlevel[3].name = q_2.5-x\nbudget.pressure.profile = aggressive\n"
                  "budget.pressure.threshold = .6, .7, .9\nbudget.pressure.max_level = 3\n",
                  reason) == TKV_OK,
              "%s", reason);
    CHECK_EQ(m.bytes, (size_t)1 << 31);
    CHECK_NEAR(m.list[2], -2, 0);
    CHECK_STR(m.level[0].name, "f16");
    CHECK_EQ(m.level[0].hot_tokens, TKV_UNLIMITED);
    CHECK_EQ(m.level[2].warm.v, TKV_R40);
    CHECK_NEAR(m.pressure.threshold[2], .9f, 0);
    CHECK_EQ(m.pressure.profile, TKV_PROFILE_AGGRESSIVE);
    CHECK_NEAR(m.pressure.alpha, 0, 0); /* the profile sets no other field */
    CHECK_EQ(tkvi_write_text(write_small_config, &m, text, sizeof text, NULL), TKV_OK);
    CHECK_STR(
        text,
        "bytes = 2147483648\nlist = 0, 0.5, -2\nlevel[0].name = f16\nlevel[0].hot_tokens = unlimited\n"
        "level[1].warm = a40/r40\nlevel[2].warm = a40/r40\nlevel[3].name = q_2.5-x\nlevel[3].warm = a40/r40\n"
        "budget.pressure.profile = aggressive\nbudget.pressure.threshold = 0.6, 0.7, 0.9\n"
        "budget.pressure.max_level = 3\n");
    memset(&back, 0, sizeof back);
    CHECK_EQ(parse_small_config(&back, text, reason), TKV_OK);
    CHECK_MEM(&m, &back, sizeof m);
    CHECK_EQ(parse_small_config(&back, "level[4].name = x", reason), TKV_ERR_CONFIG);
    CHECK_EQ(parse_small_config(&back, "level[0].name = longname", reason), TKV_ERR_CONFIG);
    CHECK_EQ(parse_small_config(&back, "level[0].name = a\"b", reason), TKV_ERR_CONFIG);
    CHECK_EQ(parse_small_config(&back, "list = 1, 2, 3, 4", reason), TKV_ERR_CONFIG);
    CHECK_EQ(parse_small_config(&back, "list = 1,, 2", reason), TKV_ERR_CONFIG);
    memset(m.level[0].name, 'x', sizeof m.level[0].name); /* the final zero is missing */
    CHECK_EQ(tkvi_write_text(write_small_config, &m, text, sizeof text, NULL), TKV_ERR_CONFIG);
}

/* Objects lie inside one another up to a bound, whatever the names of the fields are. */
TEST(depth_has_a_bound) {
    static const tkvi_fields fields[] = {{"a.b.c.d.e.f.g.h", 0, 0, 0, TKVI_ROWS_OF(small_rows)},
                                         {"b.b.c.d.e.f.g", 0, 0, 0, TKVI_ROWS_OF(small_rows)}};
    static const char deep[] =
        "{\"a\":{\"b\":{\"c\":{\"d\":{\"e\":{\"f\":{\"g\":{\"h\":{\"bytes\":5}}}}}}}}}",
                      deepest[] = "{\"b\":{\"b\":{\"c\":{\"d\":{\"e\":{\"f\":{\"g\":{\"bytes\":5}}}}}}}}";
    char reason[REASON];
    small_config m;
    tkvi_parser p;
    memset(&m, 0, sizeof m);
    tkvi_parse_begin(&p, fields, 2, &m, deep, strlen(deep), reason, REASON);
    CHECK_EQ(tkvi_parse_all(&p, TKVI_CHECK), TKV_ERR_CONFIG);
    CHECK_STR(reason, "line 1: objects lie too deep inside one another");
    CHECK_EQ(m.bytes, 0);
    tkvi_parse_begin(&p, fields, 2, &m, deepest, strlen(deepest), reason, REASON);
    CHECK_EQ(tkvi_parse_all(&p, TKVI_CHECK), TKV_OK);
    CHECK_EQ(m.bytes, 5);
}

/* >>metrics */
/* Rows of one metric are adjacent, and only the first has a help text. Names are unique in a section. */
TEST(metric_rows_are_in_order) {
    int i, k;
    for (i = 0; i < TKVI_FIGURES; i++) {
        const tkvi_figure *f = &tkvi_figure_rows[i];
        const int same_metric = i > 0 && f->metric && tkvi_figure_rows[i - 1].metric &&
                                strcmp(f->metric, tkvi_figure_rows[i - 1].metric) == 0;
        CHECK(f->metric == NULL || same_metric == !f->help);
        CHECK(f->section >= 0 && f->section < TKVI_SECTIONS);
        for (k = 0; k < i; k++) {
            const tkvi_figure *g = &tkvi_figure_rows[k];
            CHECK(f->section != g->section || strcmp(f->name, g->name) != 0);
            CHECK(same_metric || !f->metric || !g->metric || strcmp(f->metric, g->metric) != 0);
        }
    }
}

int main(int argc, char **argv) {
    tkv_test_begin(argc, argv);
    RUN(every_field_has_a_row);
    RUN(values_of_rows_have_public_names);
    RUN(fields_of_a_small_config);
    RUN(depth_has_a_bound);
    RUN(metric_rows_are_in_order);
    return tkv_test_end();
}
