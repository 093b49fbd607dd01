/*
 * context_job.h - the job around examples/context_mpi.c, without MPI: what its ranks have done, notes of ranks that
 * work, and a launcher that says what a dead rank held. Include program.h first.
 *
 * In this order: progress, notes, the launcher.
 */
#ifndef CONTEXT_JOB_H
#define CONTEXT_JOB_H

#include <signal.h>
#include <sys/stat.h>
#include <sys/wait.h>

enum { JOB_PATH = 1000, JOB_RANKS = 4096, SHOWN_RANGES = 4 };

/* What all ranks know. It has ints only: it travels and is saved as an array of them. */
typedef struct progress {
    int generation;                   /* of the checkpoint */
    int n_ranks, sinks, stripe;       /* stripe: tokens of one */
    int n_stripes;                    /* stripe s was given to rank s % n_ranks */
    int n_cached, n_tokens, n_prompt; /* tokens in the caches; known tokens; tokens of the prompt */
    int checksum[2];                  /* of all merged outputs */
} progress;
enum { N_NUMBERS = sizeof(progress) / sizeof(int) };

/* >>progress */
static inline int first_of_stripe(const progress *p, int stripe) { return p->sinks + p->stripe * stripe; }

/* Writes the tokens that a rank holds. Those behind the stripes are on rank 0. */
static inline void print_ranges(FILE *out, const progress *p, int rank) {
    const int n = p->n_stripes / p->n_ranks + (rank < p->n_stripes % p->n_ranks);
    if (rank == 0 && p->sinks) fprintf(out, "0-%d, ", p->sinks - 1);
    for (int i = 0; i < n && i < SHOWN_RANGES; i++) {
        const int first = first_of_stripe(p, rank + i * p->n_ranks);
        fprintf(out, "%s%d-%d", i ? ", " : "", first, first + p->stripe - 1);
    }
    if (n > SHOWN_RANGES) fprintf(out, ", ... (%d stripes)", n);
    if (rank == 0) fprintf(out, "%s%d and later", n ? ", " : "", first_of_stripe(p, p->n_stripes));
    else if (n == 0) fprintf(out, "none");
}

/* Begins a file with the progress as a line of text. Returns 0, or -1 and sets errno. */
static inline int begin_progress(save_file *f, const char *path, const char *model, const progress *p) {
    int numbers[N_NUMBERS];
    if (save_file_begin(f, path) != 0) return -1;
    memcpy(numbers, p, sizeof numbers);
    fprintf(f->out, PROGRAM " %s", model);
    for (int i = 0; i < N_NUMBERS; i++) fprintf(f->out, " %d", numbers[i]);
    fprintf(f->out, "\n");
    return 0;
}

static inline int write_progress(const char *path, const char *model, const progress *p) {
    save_file f;
    return begin_progress(&f, path, model, p) != 0 ? -1 : save_file_end(&f);
}

/* Reads such a file. Returns 0 if the file is missing or damaged. */
static inline int read_progress(const char *path, char *model, progress *p) {
    int numbers[N_NUMBERS];
    FILE *f = fopen(path, "r");
    if (!f) return 0;
    int ok = fscanf(f, PROGRAM " %16s", model) == 1;
    for (int i = 0; i < N_NUMBERS; i++) ok = ok && fscanf(f, "%d", &numbers[i]) == 1;
    (void)fclose(f);
    if (!ok) return 0;
    memcpy(p, numbers, sizeof numbers);
    return p->generation >= 0 && p->n_ranks >= 1 && p->sinks >= 0 && p->sinks <= TKV_BLOCK_TOKENS &&
           p->stripe >= TKV_BLOCK_TOKENS && p->n_stripes >= 0 && p->n_stripes <= PROGRAM_MOST / p->stripe;
}

static inline void name_state(const char *dir,
                              char *path) { /* the file that names the checkpoint that counts */
    if (snprintf(path, JOB_PATH, "%s/state", dir) >= JOB_PATH) fail("%s: the name is too long", dir);
}

/* >>notes. A rank that works has a note in the folder. It removes the note at its end, and when mpirun ends it. A rank
 * that dies leaves it. mpirun sends SIGCONT as soon as a rank has died, SIGTERM a second later, and SIGKILL at once
 * behind that: too soon for a busy machine, so SIGCONT counts too. A job that goes on behind it has notes again with
 * the next stripes. */
static char own_note[JOB_PATH]; /* "": none */

static inline void name_note(const char *dir, int rank, char *path) {
    if (snprintf(path, JOB_PATH, "%s/rank-%d.alive", dir, rank) >= JOB_PATH)
        fail("%s: the name is too long", dir);
}

static inline void remove_note(void) {
    if (*own_note) (void)unlink(own_note);
}

static inline void hear_signal(int number) {
    remove_note();
    if (number == SIGTERM) _exit(128 + number);
}

/* Replaces the note. It need not reach the disk: it outlives the rank, not the machine. */
static inline void write_note(const char *model, const progress *p) {
    save_file f;
    if (!*own_note) return;
    if (begin_progress(&f, own_note, model, p) != 0 || save_file_end_unflushed(&f) != 0)
        fail("cannot write %s: %s", own_note, strerror(errno));
}

static inline void begin_notes(const char *dir, int rank, const char *model, const progress *p) {
    if (mkdir(dir, 0777) && errno != EEXIST) fail("cannot make %s: %s", dir, strerror(errno));
    name_note(dir, rank, own_note);
    (void)signal(SIGTERM, hear_signal);
    (void)signal(SIGCONT, hear_signal);
    write_note(model, p);
}

/* >>the launcher */
static inline int run_mpirun(char **words) { /* returns 1 if the job has ended well */
    int status = 0;
    const pid_t child = fork();
    if (child == 0) {
        (void)execvp(words[0], words);
        fail("cannot run %s: %s", words[0], strerror(errno));
    }
    if (child < 0 || waitpid(child, &status, 0) != child)
        fail("cannot run %s: %s", words[0], strerror(errno));
    return WIFEXITED(status) && WEXITSTATUS(status) == 0;
}

/* Runs the job of `PROGRAM --launch RANKS ...`. If it fails, says which tokens a dead rank held and where to go on. */
static inline int launch(int argc, char **argv) {
    static char mpirun[] = "mpirun", dash_n[] = "-n";
    int n = 0;
    const char *dir = NULL;
    char path[JOB_PATH], model[MODEL_NAME];
    progress p;
    if (argc < 3 || !read_int(argv[2], 1, JOB_RANKS, &n)) fail("--launch needs a number of ranks");
    for (int i = 3; i + 1 < argc; i++)
        if (strcmp(argv[i], "--save") == 0 || strcmp(argv[i], "--resume") == 0) dir = argv[i + 1];
    if (!dir) fail("--launch needs --save or --resume: ranks leave notes in that folder");
    for (int rank = 0; rank < n; rank++) {
        name_note(dir, rank, path);
        (void)unlink(path);
    }
    char **words = (char **)allocate((size_t)argc + 2, sizeof *words);
    words[0] = mpirun;
    words[1] = dash_n;
    words[2] = argv[2];
    words[3] = argv[0];
    for (int i = 3; i <= argc; i++) words[i + 1] = argv[i]; /* with the NULL at the end */
    const int is_well = run_mpirun(words);
    free(words);
    for (int rank = 0; rank < n && !is_well; rank++) {
        name_note(dir, rank, path);
        if (!read_progress(path, model, &p)) continue;
        fprintf(stderr, PROGRAM ": rank %d died; it held the tokens ", rank);
        print_ranges(stderr, &p, rank);
        fprintf(stderr, "\n");
    }
    name_state(dir, path);
    const int has_state = !is_well && read_progress(path, model, &p);
    if (has_state)
        fprintf(stderr, PROGRAM ": the checkpoint has %d tokens; --resume %s goes on behind them\n",
                p.n_cached, dir);
    else if (!is_well) fprintf(stderr, PROGRAM ": there is no checkpoint in %s\n", dir);
    return !is_well;
}

#endif /* CONTEXT_JOB_H */
