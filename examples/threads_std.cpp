/*
 * threads_std.cpp - attention by std::thread: a few threads live as long as the program, and each computes one part of
 * every call.
 *
 * cc -O2 -c examples/tieredkv.c &&
 * c++ -std=c++11 -O2 -o threads_std examples/threads_std.cpp tieredkv.o -lm -pthread && ./threads_std
 */
#include "threads.h"

#include <atomic>
#include <thread>
#include <vector>

int main() {
    example e = begin_example();
    int wrong = 0;
    for (int n_parts : {1, 2, 4}) {
        std::atomic<int> step(0), ended(0); /* the step that may run; parts of all steps that have ended */
        std::vector<std::thread> threads;
        for (int part = 0; part < n_parts; part++)
            threads.emplace_back([&, part] {
                for (int mine = 1; mine <= STEPS; mine++) {
                    while (step < mine) std::this_thread::yield();
                    check(tkv_attend_part(e.kv, &e.call, part, n_parts, e.workspace, e.bytes));
                    ended++;
                }
            });
        const double start = seconds_now();
        for (int i = 1; i <= STEPS; i++) { /* a program appends K and V here, while no part runs */
            step = i;
            while (ended < i * n_parts) std::this_thread::yield();
        }
        wrong |= report_steps(&e, "std::thread", n_parts, seconds_now() - start);
        for (std::thread &t : threads) t.join();
    }
    end_example(&e);
    return wrong;
}
