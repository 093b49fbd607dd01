/* Generated: build/tests/test_save --golden > tests/golden_saved.h */
/* clang-format off */
#ifndef TKV_GOLDEN_SAVED_H
#define TKV_GOLDEN_SAVED_H

#include <stdint.h>

/* What tests/data/saved-VERSION-NAME.tkvs holds (test_save.c): its number there, hash_of_tokens, and a
 * channel of attention in each layer. */
typedef struct golden_file {
    int version, number;
    const char *name;
    uint64_t hash;
    double out[2];
} golden_file;

static const golden_file golden_saved[] = {
    {1, 4, "cache-uncleared", 0x6076fe5de18b626du, {0.0375, 0.0000}},
    {1, 2, "evicted-uncleared", 0x77e0da61df9b0537u, {0.1312, 0.0000}},
    {1, 3, "moved-uncleared", 0x0f7f139be4d0672fu, {-0.0218, 0.0000}},
    {1, 0, "exact", 0xd084960987db5616u, {0.1746, 0.0958}},
    {1, 1, "tables", 0x8715ce65c7ec060au, {-0.0549, 0.0000}},
    {1, 2, "evicted", 0x77e0da61df9b0537u, {0.1312, 0.0000}},
    {1, 3, "moved", 0x0f7f139be4d0672fu, {-0.0218, 0.0000}},
    {1, 4, "cache", 0x6076fe5de18b626du, {0.0375, 0.0000}},
};

#endif /* TKV_GOLDEN_SAVED_H */
