/*
 * white_stack.c - white-box test of the memory that calls work in: the stack that attention and appends use, by the
 * part of a filled stack that changed, and bits where no area is free (kernels/prefill.h).
 *
 * It takes the areas of a cache, as calls at the same time do (white.h).
 */
#ifndef _XOPEN_SOURCE
#define _XOPEN_SOURCE 600 /* pthread_attr_setstack, posix_memalign */
#endif
#include "white.h"
#include "kit.h"

/* 1: other calls have all areas of the cache. */
static void take_areas(tkv_cache *kv, int taken) {
    int i;
    for (i = 0; i < kv->work.n_areas; i++) kv->work.area_taken[i] = taken;
}

/* >>stack (api.h gives the limit) */
#if defined(__has_feature)
#define HAS_FEATURE(x) __has_feature(x)
#else
#define HAS_FEATURE(x) 0
#endif
#if defined(__OPTIMIZE__) && defined(__x86_64__) && !defined(__SANITIZE_ADDRESS__) &&                        \
    !defined(__SANITIZE_THREAD__) && !HAS_FEATURE(address_sanitizer) && !HAS_FEATURE(thread_sanitizer) &&    \
    !HAS_FEATURE(memory_sanitizer) && !defined(TKV_COVERAGE)
#include <pthread.h>

#ifdef __clang__
#define ATTEND_KIB 160 /* clang lets fewer variables share their memory */
#else
#define ATTEND_KIB 128
#endif

enum {
    STACK = 1 << 18,
    STACK_LIMIT = ATTEND_KIB << 10,
    OFFLOAD_STACK = 36 << 10,
    RECOMPUTE_STACK = 68 << 10,
    MOVED_STACK = 44 << 10,
    WIDEST = TKV_MAX_HEAD_DIM,
    QUERIES = 16,
    STORED = 96
};

/* What a cache has beside a tier of each pair of formats. */
typedef struct stack_case {
    const char *name;
    int dim, v_in_k, n_tokens;
    int meter, offloads, discards;
    int beside; /* 1: other calls have all areas */
} stack_case;

static const stack_case cases[] = {
    {"256 channels", 256, 0, 320, 0, 0, 0, 0},
    {"a meter", 256, 0, 320, 1, 0, 0, 0},
    {"offloaded blocks", 256, 0, 320, 0, 1, 0, 0},
    {"discarded tokens", 256, 0, 320, 0, 0, 1, 0},
    {"240 channels", 240, 0, 320, 0, 0, 0, 0}, /* not a power of 2: rotations take more memory */
    {"512 channels", 512, 0, 320, 0, 0, 0, 0},
    {"576 channels", WIDEST, 0, 320, 0, 0, 0, 0},
    {"V inside K, a meter", WIDEST, 1, 320, 1, 0, 0, 0},
    {"V inside K, splits, a meter", WIDEST, 1, 1280, 1, 0, 0, 0},
    {"V inside K, other calls", WIDEST, 1, 320, 0, 0, 0, 1},
    {"V inside K, splits, other calls", WIDEST, 1, 1280, 0, 0, 0, 1},
    {"V inside K, splits, other calls, a meter", WIDEST, 1, 1280, 1, 0, 0, 1},
};

typedef struct stack_call {
    tkv_cache *kv;
    const float *x; /* [66][WIDEST] */
    float *out;
    int n;     /* queries; 0: appends 66 tokens instead */
    int parts; /* 0: tkv_attend; else tkv_attend_part, with so many parts */
} stack_call;

static unsigned char workspace[TKV_MAX_ATTEND_BYTES]; /* of parts; zeros at the front after each call */

static uint8_t stored[STORED][80 << 10];

static int write_block(void *user, uint32_t key, size_t offset, const void *bytes, size_t size) {
    (void)user;
    if (key >= STORED || offset + size > sizeof stored[0]) return 1;
    memcpy(stored[key] + offset, bytes, size);
    return 0;
}

static int read_block(void *user, uint32_t key, size_t offset, void *bytes, size_t size) {
    (void)user;
    memcpy(bytes, stored[key] + offset, size);
    return 0;
}

static int compute_zeros(void *user, int seq, int layer, int head, const int *positions, int n, float *k,
                         float *v) {
    (void)user, (void)seq, (void)layer, (void)head, (void)positions;
    if (k) memset(k, 0, (size_t)(n * 256) * sizeof *k);
    if (v) memset(v, 0, (size_t)(n * 256) * sizeof *v);
    return 0;
}

static void *run_stack_call(void *arg) {
    const stack_call *c = (const stack_call *)arg;
    int t, status = TKV_OK;
    if (c->n && !c->parts) status |= tkv_attend(c->kv, 0, 0, c->x, c->n, c->out);
    for (t = 0; t < c->parts; t++) {
        tkv_attend_params p;
        memset(&p, 0, sizeof p);
        p.n = c->n;
        p.q = c->x;
        p.out = c->out;
        status |= tkv_attend_part(c->kv, &p, t, c->parts, workspace, sizeof workspace);
    }
    for (t = 0; !c->n && t < 66; t++) status |= tkv_append(c->kv, 0, 0, c->x, c->x, 1);
    return status ? arg : NULL;
}

static int measure_stack(stack_call *c, unsigned char *stack) {
    pthread_attr_t attr;
    pthread_t thread;
    void *failed = NULL;
    int at = 0;
    memset(stack, 0xa5, STACK);
    pthread_attr_init(&attr);
    CHECK_EQ(pthread_attr_setstack(&attr, stack, STACK), 0);
    CHECK_EQ(pthread_create(&thread, &attr, run_stack_call, c), 0);
    pthread_join(thread, &failed);
    pthread_attr_destroy(&attr);
    CHECK(failed == NULL);
    while (at < STACK && stack[at] == 0xa5) at++;
    return STACK - at;
}

static tkv_cache *make_cache_of(const stack_case *s, tkv_format_pair pair, const float *x) {
    tkv_config cfg = make_sized_config(1, 8, 1, s->dim, 1, 2048);
    tkv_cache *kv;
    int t, n = 0;
    if (s->v_in_k) cfg.model.v_in_k = 1, cfg.model.v_head_dim = 512;
    cfg.model.rope.dim = s->dim == WIDEST ? 64 : s->dim;
    cfg.model.rope.first = s->v_in_k ? 512 : 0;
    cfg.tiers.warm = cfg.tiers.archive = pair;
    cfg.meter.heads = cfg.meter.every = s->meter;
    cfg.importance.sample_every = 1;
    if (s->offloads) cfg.offload.write = write_block, cfg.offload.read = read_block;
    if (s->discards) cfg.recompute.compute = compute_zeros, cfg.recompute.cost.layer_params = 1.0;
    cfg.host.isa = tkv_test_isa();
    kv = create_cache(&cfg);
    for (t = 64; t < s->n_tokens; t += 64) CHECK_EQ(tkv_append(kv, 0, 0, x, x, 64), TKV_OK);
    CHECK_EQ(tkv_seq_flush(kv, 0, TKV_FLUSH_FULL), TKV_OK);
    CHECK_EQ(tkv_append(kv, 0, 0, x, x, 64), TKV_OK);
    if (s->offloads) CHECK_EQ(tkv_offload(kv, 0, 0, 8, &n), TKV_OK);
    if (s->discards) CHECK_EQ(tkv_seq_discard(kv, 0, 200, &n), TKV_OK);
    CHECK_EQ(n > 1, s->offloads || s->discards);
    return kv;
}

TEST(stack_stays_below_the_documented_limit) {
    static const tkv_format_pair pairs[] = {{TKV_F16, TKV_F16},      {TKV_Q8, TKV_Q8},
                                            {TKV_KIVI4, TKV_KIVI2},  {TKV_A30, TKV_R30},
                                            {TKV_A40, TKV_R15},      {TKV_KVQUANT4, TKV_KVQUANT3},
                                            {TKV_SQUAT4, TKV_KIVI4}, {TKV_SUBSPACE4, TKV_SUBSPACE2},
                                            {TKV_FP8_E4M3, TKV_FP4}};
    static const int queries[] = {0, 1, QUERIES, 1, QUERIES};
    static float x[66 * WIDEST], out[QUERIES * 8 * WIDEST];
    unsigned char *stack = NULL;
    tkv_rng rng = tkv_rng_seed(3);
    int i, k, t, most_used = 0, used;
    CHECK_EQ(posix_memalign((void **)&stack, 4096, STACK), 0);
    tkv_rng_fill(&rng, x, COUNT(x), 1.0);
    for (i = 0; i < COUNT(pairs); i++)
        for (k = 0; k < COUNT(cases); k++) {
            const stack_case *s = &cases[k];
            stack_call c;
            /* scalar kernels need no area, and take long */
            if ((s->beside || s->n_tokens > 1000) && tkv_test_isa() == TKV_ISA_SCALAR) continue;
            if (s->v_in_k && pairs[i].k > TKV_A15) continue;        /* not for V inside K */
            if (s->dim > 256 && pairs[i].k == TKV_SQUAT4) continue; /* at most 256 channels */
            c.kv = make_cache_of(s, pairs[i], x);
            c.x = x;
            c.out = out;
            take_areas(c.kv, s->beside);
            for (t = 0; t < 10; t++) { /* append, attend, attend_part; then the same with moved tokens */
                const int moved = t / 5 * MOVED_STACK;
                c.n = queries[t % 5];
                c.parts = t % 5 > 2 ? 2 : 0;
                if (t == 5 && s->discards) break; /* discarded tokens cannot move */
                if (t == 5) CHECK_EQ(tkv_seq_shift(c.kv, 0, 70, TKV_UNLIMITED, 1000), TKV_OK);
                used = measure_stack(&c, stack);
                CHECK_MSG(used <= STACK_LIMIT + moved +
                                      (!c.n          ? 0
                                       : s->discards ? RECOMPUTE_STACK
                                       : s->offloads ? OFFLOAD_STACK
                                                     : 0),
                          "%d bytes: %s, %d queries, %d parts, %s", used,
                          tkv_get_name(TKV_NAME_FORMAT, (int)pairs[i].k), c.n, c.parts, s->name);
                most_used = used > most_used ? used : most_used;
            }
            take_areas(c.kv, 0);
            tkv_destroy(c.kv);
        }
    CHECK_LE(16384, most_used); /* the stack was filled before */
    free(stack);
}
#else
TEST(stack_stays_below_the_documented_limit) {
    SKIP("needs an optimized x86-64 build without sanitizers and without counts of coverage");
}
#endif

/* >>calls at the same time: those that find no area compute V by halves */
typedef struct latent_shape {
    int heads, kv_heads, dim, v_dim;
} latent_shape;

enum { MAX_HEADS = 34, TOKENS = 1100, ROWS = 2 };

static tkv_cache *make_latents(const latent_shape *s, tkv_format format, const float *keys, int moved) {
    tkv_config cfg = make_sized_config(1, s->heads, s->kv_heads, s->dim, 1, TOKENS);
    tkv_cache *kv;
    int t;
    cfg.model.v_in_k = 1;
    cfg.model.v_head_dim = s->v_dim;
    cfg.format.group_size = 32;
    cfg.tiers.warm = cfg.tiers.archive = pair_of(format, TKV_FORMAT_DEFAULT);
    cfg.importance.sample_every = 1;
    cfg.meter.heads = cfg.meter.every = 1;
    if (moved) cfg.model.rope.dim = 16, cfg.model.rope.first = s->dim - 16;
    kv = create_cache(&cfg);
    for (t = 0; t < TOKENS; t += 100)
        CHECK_EQ(tkv_append(kv, 0, 0, keys + t * s->kv_heads * s->dim, NULL, 100), TKV_OK);
    CHECK_EQ(tkv_seq_flush(kv, 0, TKV_FLUSH_ALL), TKV_OK);
    CHECK_EQ(tkv_append(kv, 0, 0, keys, NULL, 5), TKV_OK);
    if (moved) CHECK_EQ(tkv_seq_shift(kv, 0, 200, TKV_UNLIMITED, 1000), TKV_OK);
    return kv;
}

/* Output, log-sum-exp, and what queries and far attention taught, by a call that has an area and by one without. */
static void check_latents(const latent_shape *s, tkv_format format, tkv_type out_type, int moved) {
    static float keys[TOKENS * TKV_MAX_HEAD_DIM], q[ROWS * MAX_HEADS * TKV_MAX_HEAD_DIM],
        lse[2][ROWS * MAX_HEADS];
    static float out[2][ROWS * MAX_HEADS * TKV_MAX_HEAD_DIM];
    float sinks[MAX_HEADS];
    tkv_rng rng = tkv_rng_seed(11);
    tkv_cache *kv[2];
    tkv_attend_params p;
    size_t bytes;
    int i, n = s->kv_heads * s->dim * TOKENS;
    CHECK_LE(n, COUNT(keys));
    tkv_rng_fill(&rng, keys, (size_t)n, 1.0);
    for (i = 0; i < n; i++) keys[i] *= 0.3f + (float)(i % s->dim % 5);
    tkv_rng_fill(&rng, q, COUNT(q), 1.0);
    tkv_rng_fill(&rng, sinks, COUNT(sinks), 1.0);
    for (i = 0; i < s->dim; i++) q[i] *= 100.0f; /* a row that needs two limbs */
    memset(out, 0, sizeof out);
    memset(&p, 0, sizeof p);
    p.n = ROWS;
    p.q = q;
    p.sink_logits = sinks;
    p.out_type = out_type;
    p.scale = (float)(0.25 / sqrt((double)s->dim));
    for (i = 0; i < 2; i++) {
        kv[i] = make_latents(s, format, keys, moved);
        p.out = out[i];
        p.lse = lse[i];
        take_areas(kv[i], i);
        CHECK_EQ(tkv_attend_ex(kv[i], &p), TKV_OK);
        take_areas(kv[i], 0);
    }
    CHECK_EQ(tkv_get_attend_bytes(kv[0], &p, &bytes), TKV_OK);
    CHECK_LE(1000, bytes); /* the call is split over keys */
    CHECK_MEM(out[1], out[0], sizeof out[0]);
    CHECK_MEM(lse[1], lse[0], (size_t)(ROWS * s->heads) * sizeof **lse);
    CHECK(kv[0]->stats.q_sq_sum || (format != TKV_A40 && format != TKV_A25));
    CHECK_EQ(kv[0]->stats.q_sq_sum != NULL, kv[1]->stats.q_sq_sum != NULL);
    if (kv[0]->stats.q_sq_sum) {
        CHECK(*kv[0]->stats.q_sq_sum != 0);
        CHECK_MEM(kv[1]->stats.q_sq_sum, kv[0]->stats.q_sq_sum, tkvi_stats_bytes(&kv[0]->tables.end));
    }
    for (i = 0; i < 2; i++) {
        check_cache(kv[i]);
        tkv_destroy(kv[i]);
    }
}

TEST(calls_without_an_area_have_the_same_bits) {
    static const latent_shape shapes[] = {
        {16, 1, 576, 512}, {20, 1, 299, 171}, {34, 2, 96, 64}, {24, 1, 80, 80}, {6, 2, 20, 3}};
    static const tkv_format formats[] = {TKV_F16, TKV_F32,  TKV_Q8,  TKV_KIVI4,
                                         TKV_A40, TKV_BF16, TKV_A25, TKV_KIVI2};
    int m, f;
    for (m = 0; m < COUNT(shapes); m++)
        for (f = 0; f < COUNT(formats); f += tkv_test_quick() ? 2 : 1)
            check_latents(&shapes[m], formats[f], f % 3 == 1 ? TKV_TYPE_F16 : TKV_TYPE_F32, (f + m) % 2);
}

int main(int argc, char **argv) {
    tkv_test_begin(argc, argv);
    RUN(stack_stays_below_the_documented_limit);
    RUN(calls_without_an_area_have_the_same_bits);
    return tkv_test_end();
}
