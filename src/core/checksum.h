/*
 * core/checksum.h - checksums of bytes that leave the library and come back: XXH64 for blocks in a store, FNV-1a
 * for calibrations and threshold texts of version 1.
 *
 * Both protect against accidents: failing media, truncated files, mixed-up blocks. Neither protects against an
 * attacker who can write to the store, because anyone can compute them.
 */
#ifndef TKVI_CORE_CHECKSUM_H
#define TKVI_CORE_CHECKSUM_H

#include "core/base.h"

/* >>FNV-1a, 64 bits */
#define TKVI_FNV1A_START 0xcbf29ce484222325u

static uint64_t tkvi_fnv1a_more(uint64_t h, const uint8_t *p, size_t n) {
    while (n--) h = (h ^ *p++) * 0x100000001b3u;
    return h;
}

/* >>XXH64: "xxHash fast digest algorithm", version 0.2.0, chapter "XXH64 algorithm description". Words are read
 * little-endian, so the result is the same on every machine. */
#define TKVI_XXH64_PRIME1 0x9e3779b185ebca87u
#define TKVI_XXH64_PRIME2 0xc2b2ae3d27d4eb4fu
#define TKVI_XXH64_PRIME3 0x165667b19e3779f9u
#define TKVI_XXH64_PRIME4 0x85ebca77c2b2ae63u
#define TKVI_XXH64_PRIME5 0x27d4eb2f165667c5u

static void tkvi_store64(uint8_t *p, uint64_t x) {
    tkvi_store32(p, (uint32_t)x);
    tkvi_store32(p + 4, (uint32_t)(x >> 32));
}

static uint64_t tkvi_rotate_left(uint64_t x, int by) { return x << by | x >> (64 - by); }

static uint64_t tkvi_xxh64_round(uint64_t sum, uint64_t word) {
    return tkvi_rotate_left(sum + word * TKVI_XXH64_PRIME2, 31) * TKVI_XXH64_PRIME1;
}

static uint64_t tkvi_xxh64_merge(uint64_t sum, uint64_t lane) {
    return (sum ^ tkvi_xxh64_round(0, lane)) * TKVI_XXH64_PRIME1 + TKVI_XXH64_PRIME4;
}

static uint64_t tkvi_xxh64_join(const uint64_t *lane) {
    uint64_t sum = tkvi_rotate_left(lane[0], 1) + tkvi_rotate_left(lane[1], 7) +
                   tkvi_rotate_left(lane[2], 12) + tkvi_rotate_left(lane[3], 18);
    int i;
    for (i = 0; i < 4; i++) sum = tkvi_xxh64_merge(sum, lane[i]);
    return sum;
}

/* The end of the algorithm: n < 32 bytes that no lane took. */
static uint64_t tkvi_xxh64_finish(uint64_t sum, const uint8_t *p, size_t n) {
    for (; n >= 8; p += 8, n -= 8)
        sum = tkvi_rotate_left(sum ^ tkvi_xxh64_round(0, tkvi_load64(p)), 27) * TKVI_XXH64_PRIME1 +
              TKVI_XXH64_PRIME4;
    for (; n >= 4; p += 4, n -= 4)
        sum = tkvi_rotate_left(sum ^ tkvi_load32(p) * TKVI_XXH64_PRIME1, 23) * TKVI_XXH64_PRIME2 +
              TKVI_XXH64_PRIME3;
    for (; n > 0; p++, n--) sum = tkvi_rotate_left(sum ^ *p * TKVI_XXH64_PRIME5, 11) * TKVI_XXH64_PRIME1;
    sum = (sum ^ sum >> 33) * TKVI_XXH64_PRIME2;
    sum = (sum ^ sum >> 29) * TKVI_XXH64_PRIME3;
    return sum ^ sum >> 32;
}

static uint64_t tkvi_xxh64(uint64_t seed, const uint8_t *p, size_t n) {
    const size_t size = n;
    uint64_t sum = seed + TKVI_XXH64_PRIME5;
    if (n >= 32) {
        uint64_t lane[4], a = seed + TKVI_XXH64_PRIME1 + TKVI_XXH64_PRIME2, b = seed + TKVI_XXH64_PRIME2,
                          c = seed, d = seed - TKVI_XXH64_PRIME1;
        for (; n >= 32; p += 32, n -= 32) {
            a = tkvi_xxh64_round(a, tkvi_load64(p));
            b = tkvi_xxh64_round(b, tkvi_load64(p + 8));
            c = tkvi_xxh64_round(c, tkvi_load64(p + 16));
            d = tkvi_xxh64_round(d, tkvi_load64(p + 24));
        }
        lane[0] = a;
        lane[1] = b;
        lane[2] = c;
        lane[3] = d;
        sum = tkvi_xxh64_join(lane);
    }
    return tkvi_xxh64_finish(sum + (uint64_t)size, p, n);
}

/* XXH64 of bytes that come in pieces, with seed 0. Fill with zeros first. */
typedef struct tkvi_xxh64_sum {
    uint64_t lane[4]; /* less their starts */
    uint8_t held[32]; /* the last n % 32 bytes */
    uint64_t n;
} tkvi_xxh64_sum;

static const uint64_t tkvi_xxh64_starts[4] = {0x60ea27eeadc0b5d6u, TKVI_XXH64_PRIME2, 0, 0x61c8864e7a143579u};

static void tkvi_xxh64_lanes(tkvi_xxh64_sum *s, const uint8_t *p) {
    int i;
    for (i = 0; i < 4; i++)
        s->lane[i] = tkvi_xxh64_round(s->lane[i] + tkvi_xxh64_starts[i], tkvi_load64(p + 8 * i)) -
                     tkvi_xxh64_starts[i];
}

static void tkvi_xxh64_add(tkvi_xxh64_sum *s, const uint8_t *p, size_t n) {
    size_t had = (size_t)(s->n % 32), more;
    s->n += n;
    if (had) {
        more = n < 32 - had ? n : 32 - had;
        memcpy(s->held + had, p, more);
        if (had + more < 32) return;
        tkvi_xxh64_lanes(s, s->held);
        p += more;
        n -= more;
    }
    for (; n >= 32; p += 32, n -= 32) tkvi_xxh64_lanes(s, p);
    if (n) memcpy(s->held, p, n);
}

static uint64_t tkvi_xxh64_end(const tkvi_xxh64_sum *s) {
    uint64_t lane[4], sum = TKVI_XXH64_PRIME5;
    int i;
    for (i = 0; i < 4; i++) lane[i] = s->lane[i] + tkvi_xxh64_starts[i];
    if (s->n >= 32) sum = tkvi_xxh64_join(lane);
    return tkvi_xxh64_finish(sum + s->n, s->held, (size_t)(s->n % 32));
}

#endif /* TKVI_CORE_CHECKSUM_H */
