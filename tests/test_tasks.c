/*
 * test_tasks.c - the parts of bench/tasks: files of questions, shares, contexts with hidden numbers, and answers of
 * forks against a cache that reads everything anew.
 *
 * cc -O2 tests/test_tasks.c examples/tieredkv.c -o test_tasks -lm && ./test_tasks [filter | --list]
 */
#include "../tieredkv.h"

#include "../examples/llama.h"
#include "../examples/plan.h"

#include "../bench/tasks.h"
#include "tkv_test.h"

/* >>questions */
#define BEES "question: What do bees make?\noption: milk\noption: honey\nanswer: 2\n"

static int parse(const char *text, task_set *s, char *err, size_t size) {
    return task_parse(text, strlen(text), s, err, size);
}

TEST(questions) {
    char err[200] = "", text[300];
    task_set s;
    REQUIRE(parse("# comment\n\n" BEES
                  "\n\nbegin: Snow is \r\noption: hot\n# in a block\noption:cold\noption: c\n"
                  "answer: 1",
                  &s, err, sizeof err));
    REQUIRE(s.n == 2);
    CHECK_STR(s.questions[0].text, "What do bees make?");
    CHECK_EQ(s.questions[0].n_options, 2);
    CHECK_STR(s.questions[0].options[1], "honey");
    CHECK_EQ(s.questions[0].answer, 1);
    CHECK_EQ(s.questions[0].begins, 0);
    CHECK_STR(s.questions[1].text, "Snow is");
    CHECK_EQ(s.questions[1].n_options, 3);
    CHECK_STR(s.questions[1].options[1], "cold");
    CHECK_EQ(s.questions[1].answer, 0);
    CHECK_EQ(s.questions[1].begins, 1);
    (void)task_prompt(&s.questions[0], 0, text, sizeof text);
    CHECK_STR(text, "Question: What do bees make?\nAnswer:");
    (void)task_prompt(&s.questions[0], 1, text, sizeof text);
    CHECK_STR(text, "Question: What do bees make?\nAnswer: honey\n\n");
    (void)task_prompt(&s.questions[1], 1, text, sizeof text);
    CHECK_STR(text, "Snow is hot\n\n");
    task_free_set(&s);
}

TEST(bad_questions) {
    static const char *const cases[][2] = {
        {"", "line 1: the file has no question"},
        {"# only a comment\n", "line 2: the file has no question"},
        {"option: a\n", "line 1: a block must begin with \"question: TEXT\" or \"begin: TEXT\""},
        {"question:\n", "line 1: the question is empty"},
        {"question: a\noption: b\noption:\n", "line 3: the option is empty"},
        {"question: a\noption: b\nanswer: 1\n", "line 4: the question above has less than two options"},
        {"question: a\noption: b\noption: c\n\n" BEES,
         "line 4: the question above has no line \"answer: N\""},
        {"question: a\noption: b\noption: c", "line 3: the question above has no line \"answer: N\""},
        {"question: a\noption: b\noption: c\nanswer: 3\n",
         "line 4: the answer must be the number of an option above it, from 1"},
        {"question: a\noption: b\noption: c\nanswer: 0\n",
         "line 4: the answer must be the number of an option above it, from 1"},
        {"question: a\noption: b\noption: c\nanswer: -1\n",
         "line 4: the answer must be the number of an option above it, from 1"},
        {"question: a\noption: b\noption: c\nanswer: 99999999999\n",
         "line 4: the answer must be the number of an option above it, from 1"},
        {BEES "option: c\n", "line 5: the answer must be the last line of its block"},
        {BEES BEES, "line 5: an empty line must stand before the next question"},
        {BEES "\nquestion: a\nchoice: b\n",
         "line 7: a line must begin with \"question:\", \"begin:\", \"option:\", \"answer:\" or #"},
        {"question: a\noption: 1\noption: 2\noption: 3\noption: 4\noption: 5\noption: 6\noption: 7\noption: "
         "8\n"
         "option: 9\n",
         "line 10: a question has at most 8 options"}};
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        char err[200] = "";
        task_set s;
        CHECK_EQ(parse(cases[i][0], &s, err, sizeof err), 0);
        CHECK_STR(err, cases[i][1]);
        CHECK(s.questions == NULL && s.bytes == NULL);
    }
}

TEST(hostile_questions) {
    char err[200] = "", text[700];
    task_set s;
    CHECK_EQ(task_parse(BEES "\0", sizeof BEES, &s, err, sizeof err), 0);
    CHECK_STR(err, "the file has a zero byte; it must be plain text");
    memset(text, 'x', sizeof text);
    memcpy(text, "question: ", 10);
    text[TASK_MAX_LINE + 1] = 0;
    CHECK_EQ(parse(text, &s, err, sizeof err), 0);
    CHECK_STR(err, "line 1: the line is longer than 500 bytes");
}

TEST(question_file_of_the_project) {
    size_t size;
    char err[200], *text = (char *)llama_read_file("bench/questions.txt", &size);
    task_set s;
    if (!text) SKIP("bench/questions.txt is not here");
    err[0] = 0;
    CHECK(task_parse(text, size, &s, err, sizeof err));
    CHECK_STR(err, "");
    CHECK_LE(60, s.n);
    for (int i = 0; i < s.n; i++)
        for (int j = 0; j < i; j++) CHECK(strcmp(s.questions[i].text, s.questions[j].text) != 0);
    task_free_set(&s);
    free(text);
}

TEST(choices) {
    task_question q;
    const double scores[3] = {-3, -4, -3.5};
    memset(&q, 0, sizeof q);
    q.options[0] = "ab", q.options[1] = "abcdef", q.options[2] = "abc";
    q.n_options = 3;
    CHECK_EQ(task_choose(&q, scores, 0), 0);
    CHECK_EQ(task_choose(&q, scores, 1), 1); /* -1.5, -.67 and -1.17 a byte */
    q.n_options = 1;
    CHECK_EQ(task_choose(&q, scores, 1), 0);
}

/* >>shares */
TEST(wilson_intervals) {
    task_interval i = task_wilson(8, 10); /* values of R: prop.test(8, 10, correct = FALSE) */
    CHECK_NEAR(i.low, 0.4901625, 1e-6);
    CHECK_NEAR(i.high, 0.9433178, 1e-6);
    i = task_wilson(0, 20);
    CHECK_NEAR(i.low, 0, 0);
    CHECK_NEAR(i.high, 0.1611252, 1e-6);
    i = task_wilson(20, 20);
    CHECK_NEAR(i.low, 0.8388748, 1e-6);
    CHECK_NEAR(i.high, 1, 0);
    i = task_wilson(0, 0);
    CHECK_NEAR(i.low, 0, 0);
    CHECK_NEAR(i.high, 1, 0);
}

TEST(only_known_keys_count) {
    task_count c = {0, 0, 0};
    task_add(&c, 1, 1);
    task_add(&c, 1, 0);
    task_add(&c, 0, 1);
    task_add(&c, 0, 0);
    CHECK_EQ(c.asked, 4);
    CHECK_EQ(c.exact, 2);
    CHECK_EQ(c.right, 1);
}

/* >>contexts */
static task_hiding demo_hiding(void) {
    task_hiding h;
    memset(&h, 0, sizeof h);
    h.depths[0] = 10, h.depths[1] = 50, h.depths[2] = 90;
    h.n_depths = 3;
    h.per_depth = 2;
    h.length = 900;
    h.needle = "The secret number of <name> is #####.";
    h.question = "The secret number of <name> is";
    return h;
}

TEST(lines_of_a_key) {
    task_key key;
    char line[40];
    memset(&key, 0, sizeof key);
    strcpy(key.digits, "12345");
    key.name = "Lear";
    CHECK_EQ(task_fill("<name>: #####, ####", &key, line, sizeof line), 17);
    CHECK_STR(line, "Lear: 12345, ####");
    CHECK_EQ(task_fill("<name>", &key, line, 5), 4);
    CHECK_EQ(task_fill("<name>", &key, line, 4), 0);
}

TEST(bad_hidings) {
    task_hiding h = demo_hiding();
    CHECK(task_check_keys(&h) == NULL);
    h.question = "What is the number?";
    CHECK_STR(task_check_keys(&h), "with several needles in a context, needle and question must have <name>");
    h.n_depths = h.per_depth = 1;
    CHECK(task_check_keys(&h) == NULL);
    h.depths[0] = 101;
    CHECK_STR(task_check_keys(&h), "a depth must be from 0 to 100 percent");
    h = demo_hiding();
    h.needle = "The secret number of <name> is 5.";
    CHECK_STR(task_check_keys(&h), "the needle must have ##### in the place of the number");
    h = demo_hiding();
    h.per_depth = 22;
    CHECK_STR(task_check_keys(&h), "a context holds at most 64 needles");
    h = demo_hiding();
    h.question = "<name> #####";
    CHECK_STR(task_check_keys(&h), "the question must not have the number");
}

/* Loads the demo model and the tokens of its prompt, which has about 1,400. */
static int load_demo(llama_model *m, int **text, int *n_text) {
    char err[256];
    size_t size;
    char *bytes = (char *)llama_read_file("examples/data/demo_prompt.txt", &size);
    if (!bytes || !llama_load("examples/data/demo.gguf", NULL, m, err, sizeof err)) {
        free(bytes);
        return 0;
    }
    *text = (int *)malloc((size + 2) * sizeof **text);
    *n_text = *text ? llama_tokenize(m, bytes, size, 0, *text) : 0;
    free(bytes);
    return *n_text > 1000;
}

static int find(const int *tokens, int n, const int *piece, int length) { /* -1: it is not there */
    for (int i = 0; i + length <= n; i++)
        if (memcmp(tokens + i, piece, (size_t)length * sizeof *piece) == 0) return i;
    return -1;
}

TEST(contexts) {
    const task_hiding h = demo_hiding();
    task_context a, b, other;
    llama_model m;
    int *text, n_text, line[TASK_MAX_LINE + 8];
    char err[200] = "";
    if (!load_demo(&m, &text, &n_text)) SKIP("examples/data/demo.gguf is not here");
    REQUIRE(task_make_context(&m, &h, 0, text, n_text, &a, err, sizeof err));
    REQUIRE(task_make_context(&m, &h, 0, text, n_text, &b, err, sizeof err));
    REQUIRE(task_make_context(&m, &h, 1, text, n_text, &other, err, sizeof err));
    CHECK_EQ(a.n_keys, 6);
    CHECK_EQ(a.n, b.n);
    CHECK(a.n < 900 - TASK_ANSWER && a.n > 850);
    CHECK_MEM(a.tokens, b.tokens, (size_t)a.n * sizeof *a.tokens);
    CHECK(memcmp(a.tokens, other.tokens, 100 * sizeof *a.tokens) != 0);
    for (int i = 0; i < 6; i++) {
        const int n = task_tokenize(&m, h.needle, &a.keys[i], "\n", line);
        const int at = find(a.tokens, a.n, line, n);
        CHECK_NEAR(at, h.depths[i / 2] / 100.0 * a.n, 0.05 * a.n);
        CHECK_EQ(a.keys[i].depth, i / 2);
        for (int j = 0; j < i; j++) CHECK(strcmp(a.keys[i].name, a.keys[j].name) != 0);
    }
    CHECK(strcmp(a.keys[0].digits, other.keys[0].digits) != 0);
    free(b.tokens);
    CHECK_EQ(task_make_context(&m, &h, 0, text, 300, &b, err, sizeof err), 0);
    CHECK(strncmp(err, "the text has 300 tokens; ", 25) == 0);
    task_hiding narrow = h;
    narrow.length = 120;
    CHECK_EQ(task_make_context(&m, &narrow, 0, text, n_text, &b, err, sizeof err), 0);
    CHECK_STR(err, "120 tokens have no room for 6 needles");
    free(a.tokens);
    free(other.tokens);
    free(text);
    llama_free(&m);
}

TEST(shots) {
    char err[200] = "";
    task_set s;
    llama_model m;
    int *text, n_text, n, line[300];
    if (!load_demo(&m, &text, &n_text)) SKIP("examples/data/demo.gguf is not here");
    REQUIRE(parse(BEES
                  "\nbegin: Snow is\noption: hot\noption: cold\nanswer: 2\n\nbegin: Fire is\noption: hot\n"
                  "option: cold\nanswer: 1\n",
                  &s, err, sizeof err));
    int *tokens = task_make_shots(&m, &s, 0, 2, 9, text, n_text, 200, &n, err, sizeof err);
    REQUIRE(tokens != NULL);
    CHECK_EQ(n, 200);
    const char *end = "Snow is cold\n\n",
               *asked = "Fire is hot\n\n"; /* question 2 is of fold 0, question 1 is not */
    int length = llama_tokenize(&m, end, strlen(end), 0, line);
    CHECK_EQ(find(tokens, n, line, length), n - length);
    length = llama_tokenize(&m, asked, strlen(asked), 0, line);
    CHECK_EQ(find(tokens, n, line, length), -1);
    free(tokens);
    CHECK(task_make_shots(&m, &s, 0, 2, 9, text, n_text, 5, &n, err, sizeof err) == NULL);
    CHECK(strstr(err, "more than the context of 5; ask for less") != NULL);
    CHECK(task_make_shots(&m, &s, 0, 2, 9, text, 100, 200, &n, err, sizeof err) == NULL);
    CHECK(strstr(err, "the text has 100 tokens; ") != NULL);
    task_free_set(&s);
    free(text);
    llama_free(&m);
}

/* >>answers */
/* Asks all keys of a context, the last one first if `backwards`. Returns the number of right answers. */
static int ask_all(task_cache *c, const task_hiding *h, const task_context *x, int backwards, int *right) {
    int sum = 0;
    for (int i = 0; i < x->n_keys; i++) {
        const int k = backwards ? x->n_keys - 1 - i : i;
        CHECK_EQ(task_ask(c, h->question, &x->keys[k], &right[k]), TKV_OK);
        sum += right[k];
    }
    return sum;
}

TEST(passkeys_of_the_demo_model) {
    const task_hiding h = demo_hiding();
    llama_model m;
    task_context x;
    int *text, n_text, right[TASK_NAMES], again[TASK_NAMES];
    char err[200] = "";
    if (!load_demo(&m, &text, &n_text)) SKIP("examples/data/demo.gguf is not here");
    REQUIRE(task_make_context(&m, &h, 0, text, n_text, &x, err, sizeof err));
    for (int i = 0; i < 2; i++) {
        task_plan plan;
        task_cache c;
        if (i == 0) task_exact_plan(&m, &plan);
        else CHECK(task_parse_plan("16,64,a30/r30 name=short", &m, &plan) == NULL);
        CHECK_STR(plan.name, i == 0 ? "exact" : "short");
        REQUIRE(task_open(&c, &m, &plan.cfg) == TKV_OK);
        CHECK_EQ(task_read(&c, TASK_CONTEXT, x.tokens, x.n), TKV_OK);
        CHECK_EQ(task_finish_context(&c), TKV_OK);
        CHECK_LE(4, ask_all(&c, &h, &x, 0, right)); /* of 6 */
        (void)ask_all(&c, &h, &x, 1, again);
        CHECK_MEM(right, again, (size_t)x.n_keys * sizeof *right); /* no answer depends on another one */
        CHECK_EQ(tkv_get_length(c.kv, TASK_CONTEXT, 0), x.n);
        task_key wrong = x.keys[2];
        wrong.digits[0] = wrong.digits[0] == '9' ? '8' : '9';
        CHECK_EQ(task_ask(&c, h.question, &wrong, &right[0]), TKV_OK);
        CHECK_EQ(right[0], 0);
        task_close(&c);
    }
    free(x.tokens);
    free(text);
    llama_free(&m);
}

/* The log likelihood of an option, from an exact cache that reads context, prompt and option as one text. */
static double score_anew(const llama_model *m, const int *context, int n, const char *prompt,
                         const char *option) {
    int tokens[1200], n_option;
    float *logits = (float *)malloc((size_t)m->vocab * sizeof *logits);
    double sum = 0;
    task_plan plan;
    task_cache c;
    task_exact_plan(m, &plan);
    CHECK_EQ(task_open(&c, m, &plan.cfg), TKV_OK);
    memcpy(tokens, context, (size_t)n * sizeof *tokens);
    n += llama_tokenize(m, prompt, strlen(prompt), 0, tokens + n);
    n_option = llama_tokenize(m, option, strlen(option), 0, tokens + n);
    CHECK_LE(2, n_option); /* else the test says little */
    CHECK_EQ(task_read(&c, TASK_CONTEXT, tokens, n), TKV_OK);
    for (int i = 0; i < n_option; i++) {
        sum -= measure_loss(c.logits, m->vocab, tokens[n + i]);
        CHECK_EQ(task_read(&c, TASK_CONTEXT, &tokens[n + i], 1), TKV_OK);
    }
    task_close(&c);
    free(logits);
    return sum;
}

TEST(scores_of_options) {
    llama_model m;
    task_set s;
    task_plan plan;
    task_cache c;
    int *text, n_text;
    double scores[TASK_MAX_OPTIONS], again[TASK_MAX_OPTIONS];
    char err[200] = "";
    if (!load_demo(&m, &text, &n_text)) SKIP("examples/data/demo.gguf is not here");
    REQUIRE(
        parse("question: Who is he?\noption: the prince of Denmark\noption: Pierre and his wife\nanswer: 2\n",
              &s, err, sizeof err));
    task_exact_plan(&m, &plan);
    REQUIRE(task_open(&c, &m, &plan.cfg) == TKV_OK);
    CHECK_EQ(task_read(&c, TASK_CONTEXT, text, 600), TKV_OK);
    CHECK_EQ(task_finish_context(&c), TKV_OK);
    CHECK_EQ(task_score(&c, &s.questions[0], scores), TKV_OK);
    CHECK_NEAR(scores[0],
               score_anew(&m, text, 600, "Question: Who is he?\nAnswer:", " the prince of Denmark"), 1e-2);
    CHECK_NEAR(scores[1], score_anew(&m, text, 600, "Question: Who is he?\nAnswer:", " Pierre and his wife"),
               1e-2);
    CHECK(scores[0] < -1 && scores[1] < -1);
    CHECK_EQ(task_score(&c, &s.questions[0], again), TKV_OK);
    CHECK_MEM(again, scores, 2 * sizeof *scores);
    CHECK_EQ(tkv_get_length(c.kv, TASK_CONTEXT, 0), 600);
    task_close(&c);
    task_free_set(&s);
    free(text);
    llama_free(&m);
}

TEST(bad_plans) {
    llama_model m;
    task_plan p;
    int *text, n_text;
    if (!load_demo(&m, &text, &n_text)) SKIP("examples/data/demo.gguf is not here");
    CHECK(strstr(task_parse_plan("preset=none", &m, &p),
                 "unknown preset; there are quality balanced compact "));
    CHECK_STR(task_parse_plan("64,448:q9", &m, &p), "unknown format \"q9\"");
    CHECK_STR(task_parse_plan("sauce=4", &m, &p), "unknown word of a plan");
    CHECK_STR(task_parse_plan("name=\"", &m, &p), "it is too long, or has a quote");
    CHECK(task_parse_plan("preset=compact hot=128", &m, &p) == NULL);
    CHECK_EQ(p.cfg.tiers.hot_tokens, 128);
    CHECK_STR(p.name, "preset=compact hot=128");
    free(text);
    llama_free(&m);
}

int main(int argc, char **argv) {
    tkv_test_begin(argc, argv);
    RUN(questions);
    RUN(bad_questions);
    RUN(hostile_questions);
    RUN(question_file_of_the_project);
    RUN(choices);
    RUN(wilson_intervals);
    RUN(only_known_keys_count);
    RUN(lines_of_a_key);
    RUN(bad_hidings);
    RUN(contexts);
    RUN(shots);
    RUN(passkeys_of_the_demo_model);
    RUN(scores_of_options);
    RUN(bad_plans);
    return tkv_test_end();
}
