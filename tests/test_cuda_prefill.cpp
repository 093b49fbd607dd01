/*
 * Attention of many queries by tieredkv_cuda.cu on a processor (cuda_on_cpu.h), against double precision on the decoded
 * values, as test_cuda_attend.cpp.
 *
 *     g++ -std=c++17 -O1 tests/test_cuda_prefill.cpp -o test_cuda_prefill -lm
 */
#define RIG_QUERIES 64
#include "cuda_rig.h"

static options many(int queries) {
    options o = plain;
    o.queries = queries;
    return o;
}

TEST(formats) {
    static const char *const pairs[] = {"kivi4",   "kivi2",   "kivi3",     "q8",        "a40/r40",
                                        "a30/r30", "a25/r20", "a20/r10",   "a15/r10",   "a27/r40",
                                        "a35/r30", "a22/r20", "kivi4/r20", "a30/kivi2", "a20/r15"};
    size_t i;
    int dim;
    for (i = 0; i < sizeof pairs / sizeof *pairs; i++)
        for (dim = 64; dim <= 128; dim += 64) {
            tkv_config cfg = config_of(dim, 4, 2);
            const options o = many(9 + (int)i);
            char name[64], k[16];
            const char *v = strchr(pairs[i], '/');
            rig r;
            snprintf(k, sizeof k, "%s", pairs[i]);
            if (v) *strchr(k, '/') = 0;
            cfg.archive.k = tkv_format_from_name(k);
            cfg.archive.v = tkv_format_from_name(v ? v + 1 : k);
            cfg.warm.k = TKV_KIVI4;
            cfg.warm.v = TKV_R40;
            if (!rig_open(&r, &cfg)) return;
            fill(&r, 0, 800);
            fill(&r, 1, 400);
            import_all(&r);
            snprintf(name, sizeof name, "%s, %d", pairs[i], dim);
            measure(&r, &o, name);
            rig_close(&r);
        }
}

int main(int argc, char **argv) {
    tkv_test_begin(argc, argv);
    RUN(formats);
    return tkv_test_end();
}
