/*
 * threads_openmp.c - attention by the threads of OpenMP: each iteration of a parallel loop computes one part of the call.
 *
 * cc -O2 -fopenmp -o threads_openmp examples/threads_openmp.c examples/tieredkv.c -lm && ./threads_openmp
 *
 * Without -fopenmp the loop runs its parts one after the other, to the same bits.
 */
#include "threads.h"

static void attend(const example *e, int n_parts) {
    int part;
#ifdef _OPENMP
#pragma omp parallel for schedule(dynamic)
#endif
    for (part = 0; part < n_parts; part++)
        check(tkv_attend_part(e->kv, &e->call, part, n_parts, e->workspace, e->bytes));
}

int main(void) {
    static const int parts[] = {1, 2, 4, 16};
    example e = begin_example();
    int i, step, wrong = 0;
    for (i = 0; i < 4; i++) {
        const double start = seconds_now();
        for (step = 0; step < STEPS; step++) attend(&e, parts[i]);
        wrong |= report_steps(&e, "OpenMP", parts[i], seconds_now() - start);
    }
    end_example(&e);
    return wrong;
}
