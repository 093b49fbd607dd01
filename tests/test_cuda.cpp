/*
 * The tests of tieredkv_cuda.cu as one program, on an emulated GPU (cuda_on_cpu.h) or on a GPU. A compiler spends
 * most of its time on the kernels, and they use the same ones.
 *
 *     g++ -std=c++17 -O2 tests/test_cuda.cpp -o test_cuda -lm
 *     nvcc -O3 -arch=native -x cu tests/test_cuda.cpp -o gpu_check            make gpu-check
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
namespace cuda_decode {
#include "../examples/cuda_decode.cu"
}
#undef main

TEST(example) { CHECK_EQ(cuda_decode::test_main(), 0); }

int main(int argc, char **argv) { /* the counts add up; the last line has them all */
    int failed, devices = 0;
    if (cudaGetDeviceCount(&devices) != cudaSuccess || devices == 0) {
        printf("there is no GPU here: nothing was checked\n");
        return 1;
    }
    failed = cuda_cache::test_main(argc, argv);
    failed |= cuda_attend::test_main(argc, argv);
    failed |= cuda_prefill::test_main(argc, argv);
    tkv_test_begin(argc, argv);
    RUN(example);
    return tkv_test_end() | failed;
}
