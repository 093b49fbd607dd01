/*
 * threads_queue.c - attention and appends by a job queue, as game engines have one: workers take jobs, and a part of a
 * call is a job. Workers that are late find fewer jobs, so there may be more parts than workers.
 *
 * cc -O2 -o threads_queue examples/threads_queue.c examples/tieredkv.c -lm -pthread && ./threads_queue
 */
#include "threads.h"

#include <pthread.h>

enum { WORKERS = 3, MOST_JOBS = 64 };

typedef struct queue {
    pthread_mutex_t lock;
    pthread_cond_t has_jobs, is_done;
    const example *e;
    tkv_cache *kv;                   /* of an append */
    const tkv_append_params *append; /* NULL: the jobs attend */
    void *workspace;                 /* [bytes] of appends; it grows */
    size_t bytes;
    int next, n_jobs, n_done, quits; /* jobs next .. n_jobs - 1 wait */
} queue;

static void *work(void *arg) {
    queue *q = (queue *)arg;
    pthread_mutex_lock(&q->lock);
    for (;;) {
        while (q->next == q->n_jobs && !q->quits) pthread_cond_wait(&q->has_jobs, &q->lock);
        if (q->quits) break;
        {
            const int part = q->next++, n_parts = q->n_jobs;
            pthread_mutex_unlock(&q->lock);
            check(q->append
                      ? tkv_append_part(q->kv, q->append, part, n_parts, q->workspace, q->bytes)
                      : tkv_attend_part(q->e->kv, &q->e->call, part, n_parts, q->e->workspace, q->e->bytes));
            pthread_mutex_lock(&q->lock);
        }
        if (++q->n_done == q->n_jobs) pthread_cond_signal(&q->is_done);
    }
    pthread_mutex_unlock(&q->lock);
    return NULL;
}

static void run_jobs(queue *q, int n_parts) {
    pthread_mutex_lock(&q->lock);
    q->next = q->n_done = 0;
    q->n_jobs = n_parts;
    pthread_cond_broadcast(&q->has_jobs);
    while (q->n_done < n_parts) pthread_cond_wait(&q->is_done, &q->lock);
    pthread_mutex_unlock(&q->lock);
}

/* An append by WORKERS jobs, or by one if it is short. */
static tkv_status append_by_jobs(void *user, tkv_cache *kv, const tkv_append_params *p) {
    queue *q = (queue *)user;
    size_t bytes;
    check(tkv_get_append_bytes(kv, p, &bytes));
    if (bytes > q->bytes) {
        free(q->workspace);
        q->workspace = calloc(1, bytes);
        if (!q->workspace) exit(1);
        q->bytes = bytes;
    }
    q->kv = kv;
    q->append = p;
    run_jobs(q, bytes > 128 ? WORKERS : 1);
    q->append = NULL;
    return TKV_OK;
}

/* Appends the prompt by jobs to another cache, and compares its attention. */
static int append_prompt(queue *q) {
    double seconds, seconds_whole;
    tkv_cache *kv = make_prompt(append_whole, NULL, &seconds_whole), *by_jobs;
    tkv_attend_params call = q->e->call;
    int same;
    tkv_destroy(kv);
    by_jobs = make_prompt(append_by_jobs, q, &seconds);
    check(tkv_attend_ex(by_jobs, &call));
    tkv_destroy(by_jobs);
    same = memcmp(q->e->out, q->e->whole, HEADS * DIM * sizeof *q->e->out) == 0;
    printf("the prompt: %.1f ms by one thread, %.1f ms by %d jobs an append, %s\n", 1e3 * seconds_whole,
           1e3 * seconds, WORKERS, same ? "the same bits as one call" : "OTHER BITS THAN ONE CALL");
    return !same;
}

int main(void) {
    static const int parts[] = {1, 3, MOST_JOBS};
    example e = begin_example();
    pthread_t worker[WORKERS];
    queue q;
    int i, step, wrong = 0;
    memset(&q, 0, sizeof q);
    pthread_mutex_init(&q.lock, NULL);
    pthread_cond_init(&q.has_jobs, NULL);
    pthread_cond_init(&q.is_done, NULL);
    q.e = &e;
    for (i = 0; i < WORKERS; i++)
        if (pthread_create(&worker[i], NULL, work, &q)) return 1;
    for (i = 0; i < 3; i++) {
        const double start = seconds_now();
        for (step = 0; step < STEPS; step++) run_jobs(&q, parts[i]);
        wrong |= report_steps(&e, "job queue", parts[i], seconds_now() - start);
    }
    wrong |= append_prompt(&q);
    pthread_mutex_lock(&q.lock);
    q.quits = 1;
    pthread_cond_broadcast(&q.has_jobs);
    pthread_mutex_unlock(&q.lock);
    for (i = 0; i < WORKERS; i++) pthread_join(worker[i], NULL);
    free(q.workspace);
    end_example(&e);
    return wrong;
}
