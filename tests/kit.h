/*
 * kit.h - helpers that several tests share.
 *
 * It makes configs and caches, checks a cache, converts floats and reads single values of a report. It also has a
 * counting allocator that can refuse, a guarded buffer, a test store that fails on demand, and hashes. A function
 * `x_of` returns the x of its argument.
 */
#ifndef TKV_KIT_H
#define TKV_KIT_H

#include "tkv_test.h"

#include <math.h>

#define COUNT(a) ((int)(sizeof(a) / sizeof *(a)))

#if defined(__FAST_MATH__) || defined(_M_FP_FAST)
enum { FAST_MATH = 1 };
#else
enum { FAST_MATH = 0 };
#endif

static inline tkv_format_pair pair_of(tkv_format k, tkv_format v) {
    tkv_format_pair p;
    p.k = k;
    p.v = v;
    return p;
}

/* The config of the cache created last, with the defaults of its sizes filled in. */
static tkv_config last_config;
static unsigned char last_has_own_kv[4096]; /* 1 for a layer that stores its own K and V */

static inline void note_config(const tkv_config *cfg) {
    int i;
    last_config = *cfg;
    for (i = 0; i < cfg->model.n_layers; i++)
        last_has_own_kv[i] = !cfg->layers || (!cfg->layers[i].share_kv && !cfg->layers[i].no_cache);
    if (!last_config.model.n_kv_heads) last_config.model.n_kv_heads = last_config.model.n_heads;
    if (!last_config.model.v_head_dim) last_config.model.v_head_dim = last_config.model.head_dim;
    if (!last_config.limits.max_seqs) last_config.limits.max_seqs = 1;
    if (!(last_config.model.scale > 0.0f))
        last_config.model.scale = 1.0f / sqrtf((float)last_config.model.head_dim);
}

static inline int has_own_kv(int layer) { return last_has_own_kv[layer]; }

/* >>delays (api.h, hot_tokens): tokens by which a layer's tiers are longer than given. rank: number of the layer among
 * the n layers with K and V of their own. For a cache without a budget. */
static inline int hot_delay_of(int rank, int n) { return n > 1 ? 64 * rank / n : 0; }

static inline int warm_delay_of(int rank, int n) {
    return n > 1 ? (64 * rank + 32) / n - hot_delay_of(rank, n) : 0;
}

/* A length with its delay. 0 and lengths from `unlimited` on have none. */
static inline int add_delay(int length, int delay, int unlimited) {
    return length == 0 || length >= unlimited ? length : length + delay;
}

/* Exits with the reason if creation fails. */
static inline tkv_cache *create_cache(const tkv_config *cfg) {
    tkv_cache *kv = NULL;
    char reason[200] = "";
    tkv_status st = tkv_create(cfg, &kv);
    if (st) {
        (void)tkv_validate_config(cfg, reason, sizeof reason);
        printf("tkv_create: %s, %s\n", tkv_get_status_text(st), reason);
        exit(2);
    }
    note_config(cfg);
    return kv;
}

/* A config with the given sizes. Other fields have their defaults; isa is that of TKV_ISA. */
static inline tkv_config make_sized_config(int layers, int heads, int kv_heads, int dim, int seqs,
                                           int chunk) {
    tkv_config cfg = tkv_default_config();
    cfg.model.n_layers = layers;
    cfg.model.n_heads = heads;
    cfg.model.n_kv_heads = kv_heads;
    cfg.model.head_dim = dim;
    cfg.limits.max_seqs = seqs;
    cfg.limits.max_append = chunk;
    cfg.host.isa = tkv_test_isa();
    return cfg;
}

static inline void check_cache(const tkv_cache *kv) {
    char reason[200] = "";
    const tkv_status st = tkv_check(kv, reason, sizeof reason);
    CHECK_MSG(st == TKV_OK, "%s", reason);
}

static inline tkv_budget_info budget_of(const tkv_cache *kv) {
    tkv_budget_info b;
    memset(&b, 0, sizeof b);
    CHECK_EQ(tkv_get_budget(kv, &b), TKV_OK);
    return b;
}

/* >>conversions of floats, bit masks */
static inline uint32_t bits_of(float x) {
    uint32_t u;
    memcpy(&u, &x, sizeof u);
    return u;
}

/* The float16 nearest to a finite float, ties to even. Larger numbers saturate. */
static inline uint16_t f16_of(float x) {
    const uint32_t u = bits_of(x), sign = u >> 16 & 0x8000u;
    const double a = (double)tkv_test_float(u & 0x7fffffffu);
    double step = 1.0 / (1 << 24); /* distance of neighbours */
    uint32_t e = 0, n;
    while (e < 31u && a >= 2048.0 * step) step *= 2.0, e++;
    if (a >= 65504.0) return (uint16_t)(sign | 0x7bffu);
    n = (uint32_t)(a / step);
    if (a / step - n > 0.5 || (!(a / step - n < 0.5) && (n & 1u))) n++;
    return (uint16_t)(sign | (n + 1024u * e)); /* a carry out of the mantissa enters the exponent */
}

static inline float float_of_f16(uint16_t h) {
    const uint32_t e = h >> 10 & 31u, m = h & 1023u;
    double x = (double)(e ? m + 1024u : m) / (1 << 24);
    uint32_t i;
    for (i = 1; i < e; i++) x *= 2.0;
    if (e == 31u) return tkv_test_float((h & 0x8000u) << 16 | 0x7f800000u | m << 13);
    return tkv_test_float((h & 0x8000u) << 16 | bits_of((float)x));
}

/* The bfloat16 nearest to a finite float, ties to even. Larger numbers saturate. */
static inline uint16_t bf16_of(float x) {
    const uint32_t u = bits_of(x), rest = u & 0xffffu;
    uint32_t h = u >> 16;
    if (rest > 0x8000u || (rest == 0x8000u && (h & 1u))) h++;
    return (uint16_t)((h & 0x7fffu) >= 0x7f80u ? (h & 0x8000u) | 0x7f7fu : h);
}

static inline float float_of_bf16(uint16_t h) { return tkv_test_float((uint32_t)h << 16); }

/* The float that a block of format F16, BF16 or F32 returns for x. */
static inline float as_stored(tkv_format f, float x) {
    return f == TKV_F16 ? float_of_f16(f16_of(x)) : f == TKV_BF16 ? float_of_bf16(bf16_of(x)) : x;
}

static inline int is_in_mask(const uint64_t *mask, int i) { return (int)(mask[i / 64] >> (i % 64) & 1u); }

static inline void add_to_mask(uint64_t *mask, int i) { mask[i / 64] |= (uint64_t)1 << (i % 64); }

/* >>single values of a report, and calls without a parameter struct */
/* The formats of a tier, in a layer of sequence 0. */
static inline tkv_status get_tier_formats(const tkv_cache *kv, int layer, tkv_tier tier,
                                          tkv_format_pair *out) {
    tkv_layer_info info;
    const tkv_status st = tkv_get_layer(kv, 0, layer, &info);
    if (!st) *out = info.format[tier];
    return st;
}

/* Blocks of a layer in all tiers, or -1 on an error. */
static inline int n_layer_blocks(const tkv_cache *kv, int seq, int layer) {
    tkv_layer_info info;
    if (tkv_get_layer(kv, seq, layer, &info)) return -1;
    return info.blocks[TKV_TIER_HOT] + info.blocks[TKV_TIER_WARM] + info.blocks[TKV_TIER_ARCHIVE];
}

/* The tier of a token. An evicted or expired token gives TKV_ERR_RANGE, a discarded one TKV_ERR_NO_SOURCE. */
static inline tkv_status tier_of(const tkv_cache *kv, int seq, int layer, int token, tkv_tier *out) {
    uint8_t tier = 0;
    const tkv_status st = tkv_get_tiers(kv, seq, layer, token, 1, &tier);
    tkv_layer_info info;
    if (st == TKV_ERR_ARG && token < 0 && tkv_get_layer(kv, seq, layer, &info) == TKV_OK)
        return TKV_ERR_RANGE;
    if (st) return st;
    if (tier == TKV_TOKEN_GONE) return TKV_ERR_RANGE;
    if (tier == TKV_TOKEN_DISCARDED) return TKV_ERR_NO_SOURCE;
    *out = (tkv_tier)tier;
    return TKV_OK;
}

/* A mask of the live tokens among start .. start+n-1, discarded ones included. */
static inline tkv_status live_mask_of(const tkv_cache *kv, int seq, int layer, int start, int n,
                                      uint64_t *mask) {
    uint8_t *tiers = (uint8_t *)malloc(n > 0 ? (size_t)n : 1);
    const tkv_status st = tkv_get_tiers(kv, seq, layer, start, n, tiers);
    int i;
    if (!tiers) exit(2);
    for (i = 0; !st && i < n; i++) {
        if (i % 64 == 0) mask[i / 64] = 0;
        mask[i / 64] |= (uint64_t)(tiers[i] != TKV_TOKEN_GONE) << (i % 64);
    }
    free(tiers);
    return st;
}

static inline tkv_status append_at(tkv_cache *kv, int seq, int layer, int position, const float *k,
                                   const float *v, int n) {
    tkv_append_params p;
    memset(&p, 0, sizeof p);
    p.seq = seq;
    p.layer = layer;
    p.n = n;
    p.k = k;
    p.v = v;
    p.positions = &position;
    return tkv_append_ex(kv, &p);
}

/* Evicts the tokens whose bits are set in a mask of n bits. */
static inline tkv_status evict_tokens(tkv_cache *kv, int seq, int layer, const uint64_t *victims, int n) {
    tkv_evict_params p;
    memset(&p, 0, sizeof p);
    p.seq = seq;
    p.layer = layer;
    p.victims = victims;
    p.n_victims = n;
    return tkv_evict(kv, &p);
}

/* A quality score, or -1 if tkv_compute_score fails. */
static inline float score_of(tkv_score_source source, double base, double value,
                             const tkv_quality_info *meter, double weight) {
    tkv_score_params p;
    float score = -1.0f;
    memset(&p, 0, sizeof p);
    p.source = source;
    p.base = base;
    p.value = value;
    p.meter = meter;
    p.weight = weight;
    (void)tkv_compute_score(&p, &score);
    return score;
}

/* Bits per value of a full block, metadata included. */
static inline double format_bits(const tkv_codec *c) {
    return c && c->head_dim ? 8.0 * (double)tkv_get_block_bytes(c) / (64.0 * c->head_dim) : 0.0;
}

/* FLOPs of recomputing tokens 0 to n - 1 in all layers, by the formula of tkv_remat_config. */
static inline double flops_of(const tkv_remat *r, int n) {
    const tkv_remat_config *c = &r->cfg;
    return (double)n * c->n_layers * (2.0 * c->layer_params + 4.0 * c->n_heads * c->head_dim * (n / 2.0));
}

/* |a - b| / |b|, L2; |a - b| where b is 0. */
static inline double float_difference(const float *a, const float *b, int n) {
    double err_sq = 0.0, sum_sq = 0.0;
    int i;
    for (i = 0; i < n; i++) {
        err_sq += ((double)a[i] - (double)b[i]) * ((double)a[i] - (double)b[i]);
        sum_sq += (double)b[i] * (double)b[i];
    }
    return sum_sq > 0.0 ? sqrt(err_sq / sum_sq) : sqrt(err_sq);
}

static inline int is_zero(const uint8_t *x, int n) {
    int i, any = 0;
    for (i = 0; i < n; i++) any |= x[i];
    return !any;
}

/* The numbers 0 .. n - 1 in a random order. */
static inline void fill_random_order(tkv_rng *rng, int *order, int n) {
    int i;
    for (i = 0; i < n; i++) order[i] = i;
    for (i = n - 1; i > 0; i--) {
        const int j = tkv_rng_below(rng, i + 1), was = order[i];
        order[i] = order[j];
        order[j] = was;
    }
}

/* A number from the environment, such as the first seed of a random test. */
static inline int int_from_env(const char *name, int value_if_unset) {
    const char *text = getenv(name);
    return text && *text ? atoi(text) : value_if_unset;
}

/* >>counting allocator: counts requests and bytes, and refuses on demand */
typedef struct counting_allocator {
    int fail_at; /* n: the n-th request from now on fails, and so do all later ones; 0: none */
    int n_requests, n_refused;
    size_t held, peak; /* bytes allocated now, and their maximum so far */
} counting_allocator;

static inline void *counting_alloc(void *user, size_t size, size_t align) {
    counting_allocator *p = (counting_allocator *)user;
    char *raw, *at;
    p->n_requests++;
    if (p->fail_at == 1) p->n_refused++;
    if (p->fail_at == 1) return NULL;
    if (p->fail_at) p->fail_at--;
    raw = (char *)malloc(size + align + sizeof raw);
    if (!raw) exit(2);
    at = raw + sizeof raw;
    at += (align - (size_t)((uintptr_t)at % align)) % align;
    memcpy(at - sizeof raw, &raw, sizeof raw);
    memset(at, 0xff, size); /* NaN for a read before the first write */
    p->held += size;
    if (p->held > p->peak) p->peak = p->held;
    return at;
}

static inline void counting_release(void *user, void *ptr, size_t size, size_t align) {
    counting_allocator *p = (counting_allocator *)user;
    char *raw;
    (void)align;
    memcpy(&raw, (char *)ptr - sizeof raw, sizeof raw);
    memset(ptr, 0xff, size); /* NaN for a read after the release */
    p->held -= size;
    free(raw);
}

static inline tkv_allocator counting_allocator_of(counting_allocator *p) {
    tkv_allocator a;
    memset(p, 0, sizeof *p);
    a.user = p;
    a.alloc = counting_alloc;
    a.release = counting_release;
    return a;
}

/* >>guarded buffer: memory for a cache in place, between two borders that must not change */
typedef struct guarded_buffer {
    uint8_t *raw, *mem;
    size_t bytes, size;
} guarded_buffer;

enum { BORDER = 4096 };

/* `bytes` of memory, filled with `fill_byte`. The address is `offset` after a multiple of 64. */
static inline guarded_buffer guarded_buffer_of(size_t bytes, size_t offset, int fill_byte) {
    guarded_buffer p;
    p.size = bytes + 2 * BORDER + 128;
    p.raw = (uint8_t *)malloc(p.size);
    if (!p.raw) exit(2);
    memset(p.raw, 0xe7, p.size);
    p.mem = p.raw + BORDER;
    p.mem += (64 - (size_t)((uintptr_t)p.mem % 64)) % 64 + offset;
    p.bytes = bytes;
    memset(p.mem, fill_byte, bytes);
    return p;
}

static inline void check_borders(const guarded_buffer *p) {
    const uint8_t *at;
    int bad = 0;
    for (at = p->raw; at < p->mem; at++) bad += *at != 0xe7;
    for (at = p->mem + p->bytes; at < p->raw + p->size; at++) bad += *at != 0xe7;
    CHECK_MSG(bad == 0, "%d bytes beside the cache's memory were written", bad);
}

/* Creates a cache in exactly the bytes of tkv_get_required_bytes. Checks that one byte less is refused. */
static inline tkv_cache *create_cache_in_place(const tkv_config *cfg, guarded_buffer *p, size_t offset) {
    tkv_cache *kv = NULL;
    size_t bytes = 0;
    CHECK_EQ(tkv_get_required_bytes(cfg, &bytes, NULL), TKV_OK);
    if (cfg->budget.bytes) CHECK_EQ(bytes, cfg->budget.bytes);
    *p = guarded_buffer_of(bytes, offset, 0xff);
    CHECK_EQ(tkv_create_in_place(cfg, p->mem, bytes - 1, &kv, NULL, 0), TKV_ERR_CAPACITY);
    CHECK_EQ(tkv_create_in_place(cfg, p->mem, bytes, &kv, NULL, 0), TKV_OK);
    if (!kv) exit(2);
    note_config(cfg);
    return kv;
}

/* >>test store: holds offloaded blocks in memory, checks that calls follow api.h, and fails on demand */
#ifndef KIT_STORE_KEYS
#define KIT_STORE_KEYS 4096
#endif
enum {
    STORE_KEYS = KIT_STORE_KEYS,
    STORE_PARTS = 16 /* maximum of parts of a block: two for each KV head */
};

typedef struct stored_key {
    int stored, n_parts;
    size_t at[STORE_PARTS], size[STORE_PARTS];
    uint8_t *bytes;
} stored_key;

typedef struct test_store {
    stored_key *key;                               /* [STORE_KEYS] */
    size_t key_bytes;                              /* maximum size of a stored block */
    int n_writes, n_reads, n_erased, n_prefetches; /* calls so far */
    int fail_write, fail_read;                     /* n: the n-th call from now on fails; 0: none */
    int corrupt_read;    /* n: the n-th read returns success and one wrong byte; 0: none */
    int n_failed;        /* calls that failed or returned a wrong byte */
    int discards_writes; /* writes return success and store nothing */
    int is_full;         /* every write fails */
    uint32_t last_key;   /* key of the last read */
} test_store;

static inline int test_store_write(void *user, uint32_t key, size_t offset, const void *bytes, size_t size) {
    test_store *d = (test_store *)user;
    stored_key *s = &d->key[key % STORE_KEYS];
    CHECK(key < STORE_KEYS);
    CHECK(offset + size <= d->key_bytes);
    d->n_writes++;
    if (offset == 0) {
        CHECK_MSG(!s->stored, "key %u was not erased", (unsigned)key);
        s->stored = 1;
        s->n_parts = 0;
    }
    CHECK(s->stored);
    if (d->is_full || (d->fail_write && --d->fail_write == 0)) {
        d->n_failed++;
        return 1;
    }
    CHECK(s->n_parts < STORE_PARTS);
    CHECK(s->n_parts == 0 || offset >= s->at[s->n_parts - 1] + s->size[s->n_parts - 1]);
    s->at[s->n_parts] = offset;
    s->size[s->n_parts++] = size;
    if (!s->bytes) s->bytes = (uint8_t *)calloc(1, d->key_bytes);
    if (!s->bytes) exit(2);
    if (!d->discards_writes) memcpy(s->bytes + offset, bytes, size);
    return 0;
}

static inline int test_store_read(void *user, uint32_t key, size_t offset, void *bytes, size_t size) {
    test_store *d = (test_store *)user;
    const stored_key *s = &d->key[key % STORE_KEYS];
    int i = 0;
    d->n_reads++;
    d->last_key = key;
    CHECK(key < STORE_KEYS && s->stored);
    while (i < s->n_parts && (s->at[i] != offset || s->size[i] != size)) i++;
    CHECK(i < s->n_parts);
    if (d->fail_read && --d->fail_read == 0) {
        memset(bytes, 0x5a, size / 2); /* the error comes after a partial read */
        d->n_failed++;
        return 1;
    }
    memcpy(bytes, s->bytes + offset, size);
    if (d->corrupt_read && --d->corrupt_read == 0) {
        uint8_t *wrong = (uint8_t *)bytes + size * 5 / 7;
        *wrong = (uint8_t)(*wrong ^ 4);
        d->n_failed++;
    }
    return 0;
}

static inline void test_store_prefetch(void *user, uint32_t key, size_t offset, size_t size) {
    test_store *d = (test_store *)user;
    d->n_prefetches++;
    CHECK(key < STORE_KEYS && d->key[key % STORE_KEYS].stored);
    CHECK(size > 0 && offset + size <= d->key_bytes);
}

static inline void test_store_erase(void *user, uint32_t key) {
    test_store *d = (test_store *)user;
    CHECK_MSG(key < STORE_KEYS && d->key[key % STORE_KEYS].stored, "key %u was erased twice", (unsigned)key);
    d->key[key % STORE_KEYS].stored = 0;
    d->n_erased++;
}

static inline int n_stored_keys(const test_store *d) {
    int i, n = 0;
    for (i = 0; i < STORE_KEYS; i++) n += d->key[i].stored;
    return n;
}

/* Creates a test store and sets its functions in the config. */
static inline void attach_test_store(test_store *d, tkv_config *cfg) {
    memset(d, 0, sizeof *d);
    CHECK_EQ(tkv_get_required_bytes(cfg, NULL, &d->key_bytes), TKV_OK);
    d->key = (stored_key *)calloc(STORE_KEYS, sizeof *d->key);
    if (!d->key) exit(2);
    cfg->offload.write = test_store_write;
    cfg->offload.read = test_store_read;
    cfg->offload.prefetch = test_store_prefetch;
    cfg->offload.erase = test_store_erase;
    cfg->offload.user = d;
}

/* Call it after tkv_destroy: every key must be erased by then. */
static inline void destroy_test_store(test_store *d) {
    int i;
    CHECK_EQ(n_stored_keys(d), 0);
    for (i = 0; i < STORE_KEYS; i++) free(d->key[i].bytes);
    free(d->key);
}

/* >>hashes: FNV-1a; a float is hashed as its little-endian bytes */
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

/* A hash for comparisons within one run. It takes 8 bytes at a time, so it depends on the byte order. A change of 8
 * bytes alone always changes it. */
static inline uint64_t hash_of_words(uint64_t h, const void *bytes, size_t n) {
    const uint8_t *p = (const uint8_t *)bytes;
    uint64_t word;
    for (; n >= sizeof word; n -= sizeof word, p += sizeof word) {
        memcpy(&word, p, sizeof word);
        h = (h ^ word) * 0x9e3779b97f4a7c15u;
        h ^= h >> 32;
    }
    return hash_of(h, p, n);
}

#endif /* TKV_KIT_H */
