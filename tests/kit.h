/*
 * kit.h - what several tests need beside the frame: pairs of formats, a cache or the end, an allocator that
 * counts and refuses, hashes of bytes and floats..
 */
#ifndef TKV_KIT_H
#define TKV_KIT_H

#include "tkv_test.h"

#define COUNT(a) ((int)(sizeof(a) / sizeof *(a)))

#if defined(__FAST_MATH__) || defined(_M_FP_FAST)
enum { FAST_MATH = 1 };
#else
enum { FAST_MATH = 0 };
#endif

static inline tkv_pair pair_of(tkv_format k, tkv_format v) {
    tkv_pair p;
    p.k = k;
    p.v = v;
    return p;
}

static inline tkv_cache *make(const tkv_config *cfg) { /* a test that cannot have one is over */
    tkv_cache *kv = NULL;
    char reason[200] = "";
    tkv_status st = tkv_create(cfg, &kv);
    if (st) {
        (void)tkv_config_validate(cfg, reason, sizeof reason);
        printf("tkv_create: %s, %s\n", tkv_status_text(st), reason);
        exit(2);
    }
    return kv;
}

/* >>an allocator that counts what it gave and refuses on demand */
typedef struct purse {
    int closed; /* 0: gives; 1: refuses; n: refuses after n - 1 more */
    int asked;
    size_t held, most;
} purse;

static inline void *purse_alloc(void *user, size_t size, size_t align) {
    purse *p = (purse *)user;
    char *raw, *at;
    p->asked++;
    if (p->closed == 1) return NULL;
    if (p->closed) p->closed--;
    raw = (char *)malloc(size + align + sizeof raw);
    if (!raw) exit(2);
    at = raw + sizeof raw;
    at += (align - (size_t)((uintptr_t)at % align)) % align;
    memcpy(at - sizeof raw, &raw, sizeof raw);
    memset(at, 0xff, size); /* NaN to whoever reads it too early */
    p->held += size;
    if (p->held > p->most) p->most = p->held;
    return at;
}

static inline void purse_release(void *user, void *ptr, size_t size, size_t align) {
    purse *p = (purse *)user;
    char *raw;
    (void)align;
    memcpy(&raw, (char *)ptr - sizeof raw, sizeof raw);
    memset(ptr, 0xff, size); /* and too late */
    p->held -= size;
    free(raw);
}

static inline tkv_allocator purse_of(purse *p) {
    tkv_allocator a;
    memset(p, 0, sizeof *p);
    a.user = p;
    a.alloc = purse_alloc;
    a.release = purse_release;
    return a;
}

/* >>FNV-1a, of floats over their little-endian bytes */
#define HASH_START 0xcbf29ce484222325u

static inline uint64_t hash_of(uint64_t h, const uint8_t *p, size_t n) {
    while (n--) h = (h ^ *p++) * 0x100000001b3u;
    return h;
}

static inline uint64_t hash_of_floats(uint64_t h, const float *x, int n) {
    int i, k;
    for (i = 0; i < n; i++)
        for (k = 0; k < 4; k++) {
            uint32_t bits;
            uint8_t byte;
            memcpy(&bits, x + i, sizeof bits);
            byte = (uint8_t)(bits >> 8 * k & 255u);
            h = hash_of(h, &byte, 1);
        }
    return h;
}

#endif /* TKV_KIT_H */
