/*
 * The three tests of tieredkv_cuda.cu on an emulated GPU (cuda_on_cpu.h) as one program. A compiler spends most of
 * its time on the kernels, and they use the same ones.
 *
 *     g++ -std=c++17 -O2 tests/test_cuda.cpp -o test_cuda -lm
 */
#include "cuda_rig.h"

#include <algorithm>
#include <string>
#include <vector>

#define main test_main
namespace cuda_cache {
#include "cuda_cache.cpp"
}
namespace cuda_attend {
#include "cuda_attend.cpp"
}
namespace cuda_prefill {
#include "cuda_prefill.cpp"
}
#undef main

int main(int argc, char **argv) { /* the counts add up; the last line has them all */
    int failed = cuda_cache::test_main(argc, argv);
    failed |= cuda_attend::test_main(argc, argv);
    return cuda_prefill::test_main(argc, argv) | failed;
}
