/*
 * core/sha256.h - SHA-256, which names prefixes by their content (persist/prefix.h). Its words are big-endian, so the
 * hash is the same on every machine.
 *
 * Source: FIPS 180-4, sections 4.1.2, 4.2.2, 5.1.1, 5.3.3 and 6.2.
 */
#ifndef TKVI_CORE_SHA256_H
#define TKVI_CORE_SHA256_H

#include "core/checksum.h"

typedef struct tkvi_sha256 {
    uint32_t h[8];
    uint64_t n; /* bytes so far */
    uint8_t chunk[64];
} tkvi_sha256;

static const uint32_t tkvi_sha256_k[64] = {
    0x428a2f98u, 0x71374491u, 0xb5c0fbcfu, 0xe9b5dba5u, 0x3956c25bu, 0x59f111f1u, 0x923f82a4u, 0xab1c5ed5u,
    0xd807aa98u, 0x12835b01u, 0x243185beu, 0x550c7dc3u, 0x72be5d74u, 0x80deb1feu, 0x9bdc06a7u, 0xc19bf174u,
    0xe49b69c1u, 0xefbe4786u, 0x0fc19dc6u, 0x240ca1ccu, 0x2de92c6fu, 0x4a7484aau, 0x5cb0a9dcu, 0x76f988dau,
    0x983e5152u, 0xa831c66du, 0xb00327c8u, 0xbf597fc7u, 0xc6e00bf3u, 0xd5a79147u, 0x06ca6351u, 0x14292967u,
    0x27b70a85u, 0x2e1b2138u, 0x4d2c6dfcu, 0x53380d13u, 0x650a7354u, 0x766a0abbu, 0x81c2c92eu, 0x92722c85u,
    0xa2bfe8a1u, 0xa81a664bu, 0xc24b8b70u, 0xc76c51a3u, 0xd192e819u, 0xd6990624u, 0xf40e3585u, 0x106aa070u,
    0x19a4c116u, 0x1e376c08u, 0x2748774cu, 0x34b0bcb5u, 0x391c0cb3u, 0x4ed8aa4au, 0x5b9cca4fu, 0x682e6ff3u,
    0x748f82eeu, 0x78a5636fu, 0x84c87814u, 0x8cc70208u, 0x90befffau, 0xa4506cebu, 0xbef9a3f7u, 0xc67178f2u};

static uint32_t tkvi_rotate_right(uint32_t x, int by) { return x >> by | x << (32 - by); }

static void tkvi_sha256_chunk(tkvi_sha256 *s) {
    uint32_t w[64], v[8];
    int i, j;
    for (i = 0; i < 16; i++) {
        const uint8_t *p = s->chunk + 4 * i;
        w[i] = (uint32_t)p[0] << 24 | (uint32_t)p[1] << 16 | (uint32_t)p[2] << 8 | p[3];
    }
    for (; i < 64; i++) {
        const uint32_t a = w[i - 15], b = w[i - 2];
        w[i] = (tkvi_rotate_right(b, 17) ^ tkvi_rotate_right(b, 19) ^ b >> 10) + w[i - 7] +
               (tkvi_rotate_right(a, 7) ^ tkvi_rotate_right(a, 18) ^ a >> 3) + w[i - 16];
    }
    memcpy(v, s->h, sizeof v);
    for (i = 0; i < 64; i++) {
        const uint32_t e = v[4], a = v[0];
        const uint32_t t1 = v[7] +
                            (tkvi_rotate_right(e, 6) ^ tkvi_rotate_right(e, 11) ^ tkvi_rotate_right(e, 25)) +
                            ((e & v[5]) ^ (~e & v[6])) + tkvi_sha256_k[i] + w[i];
        const uint32_t t2 = (tkvi_rotate_right(a, 2) ^ tkvi_rotate_right(a, 13) ^ tkvi_rotate_right(a, 22)) +
                            ((a & v[1]) ^ (a & v[2]) ^ (v[1] & v[2]));
        for (j = 7; j > 0; j--) v[j] = v[j - 1];
        v[4] += t1;
        v[0] = t1 + t2;
    }
    for (i = 0; i < 8; i++) s->h[i] += v[i];
}

static tkvi_sha256 tkvi_sha256_begin(void) {
    static const uint32_t start[8] = {0x6a09e667u, 0xbb67ae85u, 0x3c6ef372u, 0xa54ff53au,
                                      0x510e527fu, 0x9b05688cu, 0x1f83d9abu, 0x5be0cd19u};
    tkvi_sha256 s;
    memset(&s, 0, sizeof s);
    memcpy(s.h, start, sizeof start);
    return s;
}

static void tkvi_sha256_add(tkvi_sha256 *s, const void *bytes, size_t n) {
    const uint8_t *p = (const uint8_t *)bytes;
    while (n) {
        const size_t at = (size_t)(s->n % 64), take = n < 64 - at ? n : 64 - at;
        memcpy(s->chunk + at, p, take);
        s->n += take;
        p += take;
        n -= take;
        if (s->n % 64 == 0) tkvi_sha256_chunk(s);
    }
}

static void tkvi_sha256_end(tkvi_sha256 *s, uint8_t out[32]) {
    static const uint8_t padding[64] = {0x80};
    const uint64_t bits = 8 * s->n;
    uint8_t length[8];
    int i;
    for (i = 0; i < 8; i++) length[i] = (uint8_t)(bits >> (56 - 8 * i) & 255);
    tkvi_sha256_add(s, padding, (size_t)((119 - s->n % 64) % 64 + 1));
    tkvi_sha256_add(s, length, 8);
    for (i = 0; i < 32; i++) out[i] = (uint8_t)(s->h[i / 4] >> (24 - 8 * (i % 4)) & 255);
}

#endif /* TKVI_CORE_SHA256_H */
