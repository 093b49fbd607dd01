/*
 * tasks.c - measures the answers of a real model with the caches of plans: passkeys in a long context, and questions
 * with options behind one.
 *
 * cc -O2 bench/tasks.c -o tasks -lm -pthread && ./tasks passkey model.gguf
 *
 * Each plan reads a context once. Each question is read by a fork of it. The exact F32 cache is a plan too. QUALITY.md
 * has results. `./tasks --help` lists the options.
 */
#ifndef _DEFAULT_SOURCE
#define _DEFAULT_SOURCE /* clock_gettime */
#endif
#define TIEREDKV_IMPLEMENTATION
#include "../tieredkv.h"

#include "../examples/llama.h"
#include "../examples/plan.h"
#include "bench.h"
#include "tasks.h"

#include <pthread.h>

static const char usage[] =
    "tasks passkey MODEL [options]    hides numbers in a long text and asks for them at its end\n"
    "tasks choice MODEL [options]     asks questions with options, behind a text and solved examples\n"
    "MODEL is a .gguf file, or a .bin of llama2.c with its tokenizer.bin in the same folder.\n"
    "\n"
    "  --plan PLAN         plan to measure; may be repeated (quality, balanced, compact, extreme, kivi). "
    "The\n"
    "                      exact cache is always measured, and alone with --plan exact\n"
    "  --text FILE         the long text (text/wiki.test.raw in $TKV_DATA or ../shared/data)\n"
    "  --context N         tokens of a context (8192 for passkey, 3000 for choice)\n"
    "  --csv FILE          writes the results as CSV, anew after each context\n"
    "  --threads N         plans and contexts that are read at once (1)\n"
    "\n"
    "passkey:\n"
    "  --depths LIST       percent of the text before a number (5,15,25,35,45,55,65,75,85,95)\n"
    "  --questions N       questions for each depth (20)\n"
    "  --per-depth N       numbers at each depth of one context (2)\n"
    "  --needle TEXT       line with the number, which replaces #####, and a name, which replaces <name>\n"
    "                      (The pass key of <name> is <name> #####. Remember <name> #####.)\n"
    "  --question TEXT     line with the question (The pass key of <name> is <name>)\n"
    "\n"
    "choice:\n"
    "  --file FILE         questions (bench/questions.txt, which says how it is written)\n"
    "  --folds N           the questions are asked in N parts. The others are the solved examples (2)\n"
    "  --shots N           most solved examples (100000)\n"
    "\n"
    "PLAN is a list of words, such as preset=compact, or hot,warm,archive:\n" PLAN_HELP
    "  name NAME          name of the plan in the table\n";

static const char *const standard_plans[] = {"preset=quality name=quality", "preset=balanced name=balanced",
                                             "preset=compact name=compact", "preset=extreme name=extreme",
                                             "preset=kivi name=kivi"};

enum { MAX_PLANS = 64, MAX_CONTEXTS = 256, MAX_THREADS = 64 };

typedef struct context { /* tokens of a context, and the answers of all plans */
    task_context keys;   /* passkey; choice has its tokens alone */
    int right[MAX_PLANS][TASK_NAMES];
    int n_done; /* plans that have finished */
} context;

static struct {
    llama_model model;
    const char *model_path, *text_path, *questions_path, *csv_path;
    int is_choice;
    task_hiding hiding;
    int questions, folds, shots; /* options of the same names */
    task_set set;
    int *text, n_text;
    task_plan plans[MAX_PLANS]; /* plan 0 is the exact cache */
    int n_plans;
    context *contexts;
    int n_contexts;
    double (*scores)[MAX_PLANS][TASK_MAX_OPTIONS]; /* choice: [question] */
    double ratio[MAX_PLANS];                       /* bytes of FP16 through bytes, at the end of a context */
    pthread_mutex_t lock;                          /* guards all fields below, and n_done */
    int next;                                      /* job j: plan j % n_plans reads context j / n_plans */
    double work, total_work, start, shown;         /* shown: time of the last progress line; 0: no line */
} all;

BENCH_PRINTF(1, 2)
static void fail(const char *fmt, ...) {
    char text[700];
    va_list ap;
    va_start(ap, fmt);
    vsnprintf(text, sizeof text, fmt, ap);
    va_end(ap);
    bench_fail("%stasks: %s", all.shown > 0 ? "\n" : "", text);
}

static const char *base_name(const char *path) {
    const char *slash = strrchr(path, '/');
    return slash ? slash + 1 : path;
}

/* >>running */
static double work_of(int position, int n) { return n * (1 + (position + n / 2) / 4000.0); }

static void progress(int position, int n) {
    pthread_mutex_lock(&all.lock);
    const double now = bench_seconds(0), t = now - all.start;
    all.work += work_of(position, n);
    const double left = all.total_work > all.work ? t * (all.total_work / all.work - 1) : 0;
    if (now - all.shown > 0.5) {
        fprintf(stderr, "\rcontext %d of %d, %.0f %%, %.0f seconds left   ", (all.next - 1) / all.n_plans + 1,
                all.n_contexts, 100 * all.work / all.total_work, left);
        fflush(stderr);
        all.shown = now;
    }
    pthread_mutex_unlock(&all.lock);
}

static void ask_keys(task_cache *c, context *x, int plan) {
    for (int i = 0; i < x->keys.n_keys; i++) {
        const tkv_status status = task_ask(c, all.hiding.question, &x->keys.keys[i], &x->right[plan][i]);
        if (status != TKV_OK) fail("%s: %s", all.plans[plan].name, tkv_get_status_text(status));
    }
}

static void ask_questions(task_cache *c, int fold, int plan) {
    for (int i = fold; i < all.set.n; i += all.folds) {
        const tkv_status status = task_score(c, &all.set.questions[i], all.scores[i][plan]);
        if (status != TKV_OK)
            fail("%s, \"%s\": %s", all.plans[plan].name, all.set.questions[i].text,
                 tkv_get_status_text(status));
    }
}

static void run_job(int plan, int index) {
    context *x = &all.contexts[index];
    task_cache c;
    tkv_memory_info memory;
    tkv_status status = task_open(&c, &all.model, &all.plans[plan].cfg);
    c.progress = progress;
    if (status == TKV_OK) status = task_read(&c, TASK_CONTEXT, x->keys.tokens, x->keys.n);
    if (status == TKV_OK) status = task_finish_context(&c);
    if (status == TKV_OK) status = tkv_get_memory(c.kv, &memory);
    if (status != TKV_OK) fail("%s: %s", all.plans[plan].name, tkv_get_status_text(status));
    if (index == 0) all.ratio[plan] = memory.ratio;
    if (all.is_choice) ask_questions(&c, index, plan);
    else ask_keys(&c, x, plan);
    task_close(&c);
}

static void write_csv(void);

static void *worker(void *unused) {
    for (;;) {
        pthread_mutex_lock(&all.lock);
        const int job = all.next < all.n_plans * all.n_contexts ? all.next++ : -1;
        pthread_mutex_unlock(&all.lock);
        if (job < 0) return unused;
        run_job(job % all.n_plans, job / all.n_plans);
        pthread_mutex_lock(&all.lock);
        if (++all.contexts[job / all.n_plans].n_done == all.n_plans && all.csv_path) write_csv();
        pthread_mutex_unlock(&all.lock);
    }
}

static void run_jobs(int threads) {
    pthread_t thread[MAX_THREADS];
    pthread_mutex_init(&all.lock, NULL);
    all.start = bench_seconds(0);
    for (int i = 0; i < all.n_contexts; i++)
        all.total_work += work_of(0, all.contexts[i].keys.n) * all.n_plans;
    all.total_work *= all.is_choice ? 1.5 : 1.2; /* questions take as much again, about */
    for (int i = 0; i < threads; i++)
        if (pthread_create(&thread[i], NULL, worker, NULL) != 0) fail("cannot start a thread");
    for (int i = 0; i < threads; i++) pthread_join(thread[i], NULL);
    if (all.shown > 0) bench_clear_line();
    all.shown = 0;
}

/* >>results. A context counts when all plans have read it. */
static task_count count_keys(int plan, int depth) { /* depth -1: all depths */
    task_count count = {0, 0, 0};
    for (int i = 0; i < all.n_contexts; i++) {
        const context *x = &all.contexts[i];
        for (int k = 0; x->n_done == all.n_plans && k < x->keys.n_keys; k++)
            if (depth < 0 || x->keys.keys[k].depth == depth)
                task_add(&count, x->right[0][k], x->right[plan][k]);
    }
    return count;
}

typedef struct choice_count {
    int asked, right[2], same[2]; /* right: of the file; same: as the exact cache. [1]: scores per byte */
    double moved;                 /* mean distance of an option's log likelihood from the exact one, nats */
} choice_count;

static choice_count count_choices(int plan) {
    choice_count c;
    int options = 0;
    memset(&c, 0, sizeof c);
    for (int i = 0; i < all.set.n; i++) {
        const task_question *q = &all.set.questions[i];
        if (all.contexts[i % all.folds].n_done < all.n_plans) continue;
        c.asked++;
        for (int norm = 0; norm < 2; norm++) {
            const int chosen = task_choose(q, all.scores[i][plan], norm);
            c.right[norm] += chosen == q->answer;
            c.same[norm] += chosen == task_choose(q, all.scores[i][0], norm);
        }
        for (int j = 0; j < q->n_options; j++, options++)
            c.moved += fabs(all.scores[i][plan][j] - all.scores[i][0][j]);
    }
    if (options) c.moved /= options;
    return c;
}

static void write_share(FILE *csv, int right, int n) {
    const task_interval i = task_wilson(right, n);
    fprintf(csv, ",%d,%.4f,%.4f", right, i.low, i.high);
}

static void write_key_rows(FILE *csv) {
    fprintf(csv, "plan,ratio,depth,asked,exact_right,right,low,high\n");
    for (int p = 0; p < all.n_plans; p++)
        for (int d = -1; d < all.hiding.n_depths; d++) {
            const task_count c = count_keys(p, d);
            fprintf(csv, "\"%s\",%.3f,", all.plans[p].name, all.ratio[p]);
            if (d < 0) fprintf(csv, "all");
            else fprintf(csv, "%d", all.hiding.depths[d]);
            fprintf(csv, ",%d,%d", c.asked, c.exact);
            write_share(csv, c.right, c.exact);
            fprintf(csv, "\n");
        }
}

static void write_csv(void) { /* call with the lock held */
    FILE *csv = fopen(all.csv_path, "wb");
    if (!csv) fail("cannot write %s", all.csv_path);
    if (!all.is_choice) write_key_rows(csv);
    else
        fprintf(csv,
                "plan,ratio,asked,acc,acc_low,acc_high,acc_norm,acc_norm_low,acc_norm_high,same,same_low,"
                "same_high,same_norm,same_norm_low,same_norm_high,moved_nats\n");
    for (int p = 0; all.is_choice && p < all.n_plans; p++) {
        const choice_count c = count_choices(p);
        fprintf(csv, "\"%s\",%.3f,%d", all.plans[p].name, all.ratio[p], c.asked);
        for (int norm = 0; norm < 2; norm++) write_share(csv, c.right[norm], c.asked);
        for (int norm = 0; norm < 2; norm++) write_share(csv, c.same[norm], c.asked);
        fprintf(csv, ",%.5f\n", c.moved);
    }
    if (fclose(csv) != 0) fail("cannot write %s", all.csv_path);
}

static void print_share(int right, int n) {
    const task_interval i = task_wilson(right, n);
    printf(" %5d %5.1f %% [%5.1f, %5.1f]", right, n ? 100.0 * right / n : 0.0, 100 * i.low, 100 * i.high);
}

static void print_keys(void) {
    printf("%-24s %5s %5s %5s %5s %26s  of those right at depth", "plan", "ratio", "asked", "exact", "right",
           "95 % interval");
    for (int d = 0; d < all.hiding.n_depths; d++) printf(" %d", all.hiding.depths[d]);
    printf("\n");
    for (int p = 0; p < all.n_plans; p++) {
        const task_count c = count_keys(p, -1);
        printf("%-24s %5.2f %5d %5d", all.plans[p].name, all.ratio[p], c.asked, c.exact);
        print_share(c.right, c.exact);
        printf(" ");
        for (int d = 0; d < all.hiding.n_depths; d++) {
            const task_count at = count_keys(p, d);
            printf(" %d/%d", at.right, at.exact);
        }
        printf("\n");
    }
}

static void print_choices(void) {
    static const char *const heads[] = {"acc", "acc per byte", "same choice", "same per byte"};
    printf("%-24s %5s %5s", "plan", "ratio", "asked");
    for (int i = 0; i < 4; i++) printf(" %29s", heads[i]);
    printf("   nats\n");
    for (int p = 0; p < all.n_plans; p++) {
        const choice_count c = count_choices(p);
        printf("%-24s %5.2f %5d", all.plans[p].name, all.ratio[p], c.asked);
        for (int norm = 0; norm < 2; norm++) print_share(c.right[norm], c.asked);
        for (int norm = 0; norm < 2; norm++) print_share(c.same[norm], c.asked);
        printf(" %6.3f\n", c.moved);
    }
}

/* >>contexts */
static char *must_read_file(const char *path, size_t *size) {
    char *text = (char *)llama_read_file(path, size);
    if (!text) fail("cannot read %s", path);
    if (*size > 1 << 28) fail("%s is longer than any context", path);
    return text;
}

static void read_text(void) {
    size_t size;
    char *text = must_read_file(all.text_path, &size);
    all.text = (int *)bench_alloc((size + 2) * sizeof *all.text);
    all.n_text = llama_tokenize(&all.model, text, size, 0, all.text);
    free(text);
}

static void read_questions(void) {
    size_t size;
    char err[300], *text = must_read_file(all.questions_path, &size);
    if (!task_parse(text, size, &all.set, err, sizeof err)) fail("%s, %s", all.questions_path, err);
    if (all.folds > all.set.n) fail("--folds %d: there are only %d questions", all.folds, all.set.n);
    all.scores = (double(*)[MAX_PLANS][TASK_MAX_OPTIONS])bench_alloc((size_t)all.set.n * sizeof *all.scores);
    free(text);
}

static void make_contexts(void) {
    const int per_depth = all.hiding.per_depth;
    char err[300];
    all.n_contexts = all.is_choice ? all.folds : (all.questions + per_depth - 1) / per_depth;
    if (all.n_contexts > MAX_CONTEXTS)
        fail("%d contexts are needed, more than %d", all.n_contexts, MAX_CONTEXTS);
    all.contexts = (context *)bench_alloc((size_t)all.n_contexts * sizeof *all.contexts);
    memset(all.contexts, 0, (size_t)all.n_contexts * sizeof *all.contexts);
    for (int i = 0; i < all.n_contexts; i++) {
        task_context *c = &all.contexts[i].keys;
        if (all.is_choice) {
            c->tokens = task_make_shots(&all.model, &all.set, i, all.folds, all.shots, all.text, all.n_text,
                                        all.hiding.length, &c->n, err, sizeof err);
            if (!c->tokens) fail("%s", err);
        } else if (!task_make_context(&all.model, &all.hiding, i, all.text, all.n_text, c, err, sizeof err))
            fail("%s", err);
    }
}

/* >>options */
static void help(int status) {
    fputs(usage, stdout);
    plan_print_names();
    exit(status);
}

static int option_number(const char *name, const char *value, int least, int most) {
    int n;
    if (!plan_count(value, strlen(value), &n) || n < least || n > most)
        fail("%s %s: it must be a whole number from %d to %d", name, value, least, most);
    return n;
}

static void parse_depths(const char *list) {
    task_hiding *h = &all.hiding;
    h->n_depths = 0;
    for (size_t n; *list; list += n + (list[n] != 0)) {
        n = strcspn(list, ",");
        if (h->n_depths == TASK_MAX_DEPTHS || !plan_count(list, n, &h->depths[h->n_depths++]))
            fail("--depths: it must be a list of at most %d numbers, such as 5,50,95", TASK_MAX_DEPTHS);
    }
}

static void add_plan(const char *text) {
    if (all.n_plans == MAX_PLANS) fail("more than %d plans", MAX_PLANS - 1);
    const char *wrong = task_parse_plan(text, &all.model, &all.plans[all.n_plans++]);
    if (wrong) fail("plan %s: %s", text, wrong);
}

static void set_defaults(void) {
    memset(&all, 0, sizeof all);
    parse_depths("5,15,25,35,45,55,65,75,85,95");
    all.hiding.per_depth = 2;
    all.hiding.needle = "The pass key of <name> is <name> #####. Remember <name> #####.";
    all.hiding.question = "The pass key of <name> is <name>";
    all.questions = 20;
    all.folds = 2;
    all.shots = 100000;
    all.questions_path = "bench/questions.txt";
}

/* Reads an option with a value. */
static void parse_option(const char *name, const char *value, int *threads) {
    if (strcmp(name, "--text") == 0) all.text_path = value;
    else if (strcmp(name, "--context") == 0) all.hiding.length = option_number(name, value, 64, 1 << 20);
    else if (strcmp(name, "--csv") == 0) all.csv_path = value;
    else if (strcmp(name, "--threads") == 0) *threads = option_number(name, value, 1, MAX_THREADS);
    else if (strcmp(name, "--depths") == 0) parse_depths(value);
    else if (strcmp(name, "--questions") == 0) all.questions = option_number(name, value, 1, 10000);
    else if (strcmp(name, "--per-depth") == 0)
        all.hiding.per_depth = option_number(name, value, 1, TASK_NAMES);
    else if (strcmp(name, "--needle") == 0) all.hiding.needle = value;
    else if (strcmp(name, "--question") == 0) all.hiding.question = value;
    else if (strcmp(name, "--file") == 0) all.questions_path = value;
    else if (strcmp(name, "--folds") == 0) all.folds = option_number(name, value, 1, MAX_CONTEXTS);
    else if (strcmp(name, "--shots") == 0) all.shots = option_number(name, value, 0, 100000);
    else if (strcmp(name, "--plan") != 0) fail("%s: unknown option (tasks --help)", name);
}

static int parse_options(int argc, char **argv) { /* returns the number of threads */
    int threads = 1;
    for (int i = 1; i < argc; i++)
        if (strcmp(argv[i], "-h") == 0 || strcmp(argv[i], "--help") == 0) help(0);
    if (argc < 3) help(1);
    all.is_choice = strcmp(argv[1], "choice") == 0;
    if (!all.is_choice && strcmp(argv[1], "passkey") != 0) help(1);
    for (int i = 2; i < argc; i++) {
        if (argv[i][0] != '-' && !all.model_path) all.model_path = argv[i];
        else if (argv[i][0] != '-' || i + 1 == argc)
            fail("%s: unknown option, or its value is missing (tasks --help)", argv[i]);
        else parse_option(argv[i], argv[i + 1], &threads), i++;
    }
    if (!all.model_path) help(1);
    if (!all.hiding.length) all.hiding.length = all.is_choice ? 3000 : 8192;
    const char *wrong = all.is_choice ? NULL : task_check_keys(&all.hiding);
    if (wrong) fail("%s", wrong);
    return threads;
}

static void add_plans(int argc, char **argv) {
    int given = 0;
    task_exact_plan(&all.model, &all.plans[all.n_plans++]);
    for (int i = 2; i + 1 < argc; i++)
        if (strcmp(argv[i], "--plan") == 0) {
            given = 1;
            if (strcmp(argv[++i], "exact") != 0) add_plan(argv[i]); /* it is always there */
        }
    const size_t n = given ? 0 : sizeof standard_plans / sizeof *standard_plans;
    for (size_t i = 0; i < n; i++) add_plan(standard_plans[i]);
}

int main(int argc, char **argv) {
    const char *data = getenv("TKV_DATA");
    char err[256], text_path[1024];
    set_defaults();
    const int threads = parse_options(argc, argv);
    if (!llama_load(all.model_path, NULL, &all.model, err, sizeof err)) fail("%s: %s", all.model_path, err);
    if (all.model.note[0]) fprintf(stderr, "tasks: %s\n", all.model.note);
    if (all.hiding.length > all.model.context)
        fprintf(stderr, "tasks: a context has %d tokens, the model's %d\n", all.hiding.length,
                all.model.context);
    snprintf(text_path, sizeof text_path, "%s/text/wiki.test.raw", data && *data ? data : "../shared/data");
    if (!all.text_path) all.text_path = text_path;
    add_plans(argc, argv);
    read_text();
    if (all.is_choice) read_questions();
    make_contexts();
    if (all.csv_path)
        write_csv(); /* a path that cannot be written ends the program here, not after an hour */
    run_jobs(threads);
    printf("%s, %s, %d contexts of %d tokens\n", base_name(all.model_path), base_name(all.text_path),
           all.n_contexts, all.hiding.length);
    if (all.is_choice) print_choices();
    else print_keys();
    return 0;
}
