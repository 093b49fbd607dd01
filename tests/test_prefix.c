/*
 * test_prefix.c - tkv_get_prefix_hash, tkv_seq_publish_prefix, tkv_seq_adopt_prefix: the same bits in another cache, hashes
 * that differ with all that decides bytes, wrong and hostile values, failed allocations, states.
 */
#include "saved_files.h"
#include "sequences.h"

enum { LAYERS = 3, SEQS = 4, VALUES = 64, TEXT = 3000, SINKS = 4 };

static int tokens[TEXT];

/* >>a store in memory */
typedef struct kept_value {
    tkv_prefix_hash hash;
    unsigned char *bytes;
    size_t n;
} kept_value;

typedef struct store {
    kept_value value[VALUES];
    int n, n_gets, n_asked,
        fails; /* 1: put fails; 2: get claims more than was asked for; 3: less than 0; 4: gives no bytes */
    const void *given; /* not NULL: get gives these bytes for every hash */
    size_t given_bytes;
} store;

static kept_value *find_value(store *s, const tkv_prefix_hash *hash) {
    int i;
    for (i = 0; i < s->n; i++)
        if (memcmp(&s->value[i].hash, hash, sizeof *hash) == 0) return &s->value[i];
    return NULL;
}

static int store_get(void *user, const tkv_prefix_hash *hashes, int n, const void **bytes, size_t *sizes) {
    store *s = (store *)user;
    int i;
    s->n_gets++;
    s->n_asked += n;
    for (i = 0; i < n; i++) {
        kept_value *v = find_value(s, &hashes[i]);
        if (s->given) {
            bytes[i] = s->given;
            sizes[i] = s->given_bytes;
            continue;
        }
        if (!v) break;
        bytes[i] = s->fails == 4 ? NULL : v->bytes;
        sizes[i] = v->n;
    }
    return s->fails == 2 && i == n ? n + 5 : s->fails == 3 ? -5 : i;
}

static int store_put(void *user, const tkv_prefix_hash *hash, const void *bytes, size_t size) {
    store *s = (store *)user;
    kept_value *v = &s->value[s->n];
    if (s->fails == 1 || s->n == VALUES) return 1;
    CHECK(!find_value(s, hash));
    v->hash = *hash;
    v->n = size;
    v->bytes = (unsigned char *)malloc(size);
    memcpy(v->bytes, bytes, size);
    s->n++;
    return 0;
}

static int store_has(void *user, const tkv_prefix_hash *hash) {
    return find_value((store *)user, hash) != NULL;
}

static tkv_prefix_store store_of(store *s) {
    const tkv_prefix_store p = {s, store_get, store_put, store_has};
    return p;
}

static void empty_store(store *s) {
    int i;
    for (i = 0; i < s->n; i++) free(s->value[i].bytes);
    memset(s, 0, sizeof *s);
}

/* >>caches */
static tkv_prefix_params params_of(int seq, int n) {
    tkv_prefix_params p;
    memset(&p, 0, sizeof p);
    p.seq = seq;
    p.spare = SEQS - 1;
    p.tokens = tokens;
    p.n_tokens = n;
    p.model = "a model";
    p.model_bytes = 7;
    return p;
}

static tkv_config config_of(int has_tables) {
    tkv_config cfg = make_config(LAYERS, SEQS);
    cfg.tiers.warm_tokens = 256;
    if (!has_tables) return cfg;
    cfg.tiers.warm = pair_of(TKV_A40, TKV_R40);
    cfg.tiers.archive = pair_of(TKV_A30, TKV_R30);
    return cfg;
}

/* A cache whose tables, if it has some, are loaded from one that has read another text. */
static tkv_cache *create_with_tables(const tkv_config *cfg) {
    static unsigned char bytes[1 << 16];
    tkv_cache *kv = create_cache(cfg);
    static size_t n;
    tkv_calibration_info info;
    CHECK_EQ(tkv_get_calibration(kv, &info), TKV_OK);
    if (cfg->tiers.warm.k != TKV_A40) return kv;
    if (!n) {
        CHECK_EQ(append_to_all_layers(kv, 0, 77, 600, 100), TKV_OK);
        CHECK_EQ(tkv_freeze_calibration(kv), TKV_OK);
        CHECK_EQ(tkv_save_calibration(kv, bytes, sizeof bytes, &n), TKV_OK);
        tkv_destroy(kv);
        kv = create_cache(cfg);
    }
    CHECK_EQ(tkv_load_calibration(kv, bytes, n), TKV_OK);
    return kv;
}

static tkv_prefix_hash hash_after(tkv_cache *kv, const tkv_prefix_params *p, int n_pages) {
    tkv_prefix_hash h;
    memset(&h, 0, sizeof h);
    CHECK_EQ(tkv_get_prefix_hash(kv, p, n_pages, &h), TKV_OK);
    return h;
}

static int is_same_hash(tkv_prefix_hash a, tkv_prefix_hash b) { return memcmp(&a, &b, sizeof a) == 0; }

/* >>the same bits */
static void compare_sequences(tkv_cache *a, int seq_a, tkv_cache *b, int seq_b) {
    snapshot x = snapshot_of_seq(a, seq_a), y = snapshot_of_seq(b, seq_b);
    CHECK(x.n > 1000 && is_same_snapshot(&x, &y));
    free_snapshot(&x);
    free_snapshot(&y);
}

static void check_attention(tkv_cache *a, int seq_a, tkv_cache *b, int seq_b) {
    float q[2 * KV_HEADS * DIM], x[2 * KV_HEADS * V_DIM], y[2 * KV_HEADS * V_DIM];
    tkv_rng rng = tkv_rng_seed(5);
    int layer;
    for (layer = 0; layer < LAYERS; layer++) {
        tkv_rng_fill(&rng, q, sizeof q / sizeof *q, 1.0);
        CHECK_EQ(tkv_attend(a, seq_a, layer, q, 1, x), TKV_OK);
        CHECK_EQ(tkv_attend(b, seq_b, layer, q, 1, y), TKV_OK);
        CHECK_MSG(memcmp(x, y, sizeof x) == 0, "layer %d, %d tokens", layer, tkv_get_length(a, seq_a, 0));
    }
}

/* One cache publishes, another adopts and goes on. A fork of the first that was cut where the prefix ends goes on too. */
static void publish_and_adopt(int has_tables, int n) {
    const tkv_config cfg = config_of(has_tables);
    tkv_cache *a = create_with_tables(&cfg), *b = create_with_tables(&cfg);
    tkv_prefix_params p = params_of(0, n);
    tkv_prefix_info info;
    static store s;
    const tkv_prefix_store callbacks = store_of(&s);
    int n_pages, layer;
    CHECK_EQ(append_to_all_layers(a, 0, 1, n, 128), TKV_OK);
    for (layer = 0, n_pages = n; layer < LAYERS;
         layer++) { /* the layer with most hot tokens, sinks among them, decides */
        tkv_layer_info l;
        CHECK_EQ(tkv_get_layer(a, 0, layer, &l), TKV_OK);
        if ((n - l.tokens[TKV_TIER_HOT]) / TKV_PAGE_TOKENS < n_pages)
            n_pages = (n - l.tokens[TKV_TIER_HOT]) / TKV_PAGE_TOKENS;
    }
    CHECK(n_pages >= n / TKV_PAGE_TOKENS - 1 && n_pages > 0);
    CHECK_EQ(tkv_seq_publish_prefix(a, &p, &callbacks, &info), TKV_OK);
    CHECK_EQ(info.n_pages, n_pages);
    CHECK_EQ(info.n_put, n_pages);
    CHECK_EQ(info.n_tokens, SINKS + TKV_PAGE_TOKENS * n_pages);
    CHECK_EQ(info.n_rejected, 0);
    CHECK_EQ(s.n, n_pages);
    check_cache(a);
    CHECK_EQ(tkv_get_length(a, p.spare, TKV_ALL_LAYERS), 0);
    CHECK_EQ(tkv_seq_publish_prefix(a, &p, &callbacks, &info), TKV_OK); /* they are there */
    CHECK_EQ(info.n_pages, n_pages);
    CHECK_EQ(info.n_put, 0);
    p.seq = 1;
    CHECK_EQ(tkv_seq_adopt_prefix(b, &p, &callbacks, &info), TKV_OK);
    CHECK_EQ(info.n_pages, n_pages);
    CHECK_EQ(info.n_tokens, SINKS + TKV_PAGE_TOKENS * n_pages);
    CHECK_EQ(info.n_rejected, 0);
    check_cache(b);
    CHECK_EQ(tkv_get_length(b, 1, TKV_ALL_LAYERS), info.n_tokens);
    CHECK_EQ(tkv_seq_fork(a, 0, 1, info.n_tokens), TKV_OK);
    compare_sequences(a, 1, b, 1);
    check_attention(a, 1, b, 1);
    CHECK_EQ(tkv_seq_reset(a, 0), TKV_OK); /* its blocks are the fork's alone now, as in the other cache */
    CHECK_EQ(append_to_all_layers(a, 1, 1, 600, 60), TKV_OK);
    CHECK_EQ(append_to_all_layers(b, 1, 1, 600, 60), TKV_OK);
    compare_sequences(a, 1, b, 1);
    check_attention(a, 1, b, 1);
    /* what was adopted and grew is published again: the first pages have the same hashes */
    p.n_tokens = info.n_tokens + 600;
    CHECK_EQ(tkv_seq_publish_prefix(b, &p, &callbacks, &info), TKV_OK);
    CHECK(info.n_put > 0 && info.n_pages == n_pages + info.n_put);
    check_cache(b);
    empty_store(&s);
    tkv_destroy(a);
    tkv_destroy(b);
}

TEST(same_bits_without_tables) {
    publish_and_adopt(0, 700);
    publish_and_adopt(0, 2400); /* more pages than one question has */
}
TEST(same_bits_with_tables) {
    publish_and_adopt(1, 700);
    publish_and_adopt(1, 2400);
}

/* >>hashes */
TEST(hashes_name_all_that_decides_bytes) {
    const tkv_config cfg = config_of(0);
    tkv_prefix_params p = params_of(0, TEXT), q;
    tkv_prefix_extra extra[2];
    tkv_cache *kv = create_cache(&cfg), *other;
    tkv_prefix_hash root = hash_after(kv, &p, 0), page = hash_after(kv, &p, 1), third = hash_after(kv, &p, 3);
    int i, *changed;
    CHECK(!is_same_hash(root, page) && !is_same_hash(page, third));
    other = create_cache(&cfg);
    CHECK(is_same_hash(hash_after(other, &p, 0), root));
    CHECK(is_same_hash(hash_after(other, &p, 3), third));
    tkv_destroy(other);
    q = p; /* fields do not run together */
    q.salt = "b";
    q.salt_bytes = 1;
    CHECK(!is_same_hash(hash_after(kv, &q, 0), root));
    q.model = "a mode";
    q.model_bytes = 6;
    q.salt = "lb";
    q.salt_bytes = 2;
    p.salt = "b";
    p.salt_bytes = 1;
    CHECK(!is_same_hash(hash_after(kv, &q, 0), hash_after(kv, &p, 0)));
    p = params_of(0, TEXT);
    for (i = 0; i < 3; i++) { /* a token changes its page and those behind it */
        changed = &tokens[i == 0 ? 0 : i == 1 ? SINKS + 255 : SINKS + 256];
        *changed += 1;
        CHECK_EQ(is_same_hash(hash_after(kv, &p, 1), page), i == 2);
        CHECK(!is_same_hash(hash_after(kv, &p, 3), third));
        *changed -= 1;
    }
    extra[0].index = SINKS + 300;
    extra[0].bytes = "cat";
    extra[0].size = 3;
    extra[1].index = TEXT - 1; /* of no page */
    extra[1].bytes = "dog";
    extra[1].size = 3;
    p.extras = extra;
    p.n_extras = 2;
    q = params_of(0, TEXT);
    CHECK(is_same_hash(hash_after(kv, &p, 1), page));
    CHECK(!is_same_hash(hash_after(kv, &p, 2), hash_after(kv, &q, 2)));
    CHECK(!is_same_hash(hash_after(kv, &p, 3), third));
    extra[0].index = SINKS + 256; /* of the second page, not of the first */
    CHECK(is_same_hash(hash_after(kv, &p, 1), page));
    CHECK(!is_same_hash(hash_after(kv, &p, 2), hash_after(kv, &q, 2)));
    extra[0].index = SINKS + 255;
    CHECK(!is_same_hash(hash_after(kv, &p, 1), page));
    tkv_destroy(kv);
    p = params_of(0, 0);
    for (i = 0; i < 8; i++) { /* what the cache is */
        tkv_config c = cfg;
        if (i == 0) c.model.head_dim = DIM + 2;
        if (i == 1) c.model.n_layers = LAYERS + 1;
        if (i == 2) c.model.rope.dim = 8, c.model.rope.base = 1e4f;
        if (i == 3) c.tiers.archive.v = TKV_KIVI3;
        if (i == 4) c.tiers.warm.k = TKV_Q8;
        if (i == 5) c.tiers.sink_tokens = 8;
        if (i == 6) c.format.group_size = 32;
        if (i == 7) c.tiers.warm_tokens = TKV_OFF;
        kv = create_cache(&c);
        CHECK_MSG(!is_same_hash(hash_after(kv, &p, 0), root), "config %d", i);
        tkv_destroy(kv);
    }
    { /* the ages of tiers decide no bytes of a tier */
        tkv_config c = cfg;
        c.tiers.hot_tokens = 128;
        c.tiers.warm_tokens = 64;
        c.limits.max_seqs = 2;
        kv = create_cache(&c);
        CHECK(is_same_hash(hash_after(kv, &p, 0), root));
        tkv_destroy(kv);
    }
}

/* Extras do not run together: none has the bytes of two, of another index, or of another length. */
TEST(extras_do_not_run_together) {
    /* Each row is a list of extras. `at` is the index, behind the sinks. */
    static const struct {
        int at[2];
        const char *bytes[2];
    } lists[] = {{{5, -1}, {"cat", NULL}}, {{6, -1}, {"cat", NULL}}, {{5, -1}, {"cats", NULL}},
                 {{5, -1}, {"", NULL}},    {{5, 5}, {"ca", "t"}},    {{5, 5}, {"c", "at"}},
                 {{5, 6}, {"cat", "dog"}}, {{5, 6}, {"catd", "og"}}, {{6, 5}, {"dog", "cat"}},
                 {{5, 6}, {"", "catdog"}}, {{5, 6}, {"catdog", ""}}, {{5, -1}, {"catdog", NULL}},
                 {{5, 300}, {"cat", ""}},  {{-1, -1}, {NULL, NULL}}};
    static const unsigned char number[] = {4, 0, 0, 0, 0, 0, 0, 0}; /* the length of an index, in a hash */
    const tkv_config cfg = config_of(0);
    tkv_prefix_params p = params_of(0, TEXT);
    tkv_prefix_hash hash[COUNT(lists)];
    tkv_cache *kv = create_cache(&cfg);
    tkv_prefix_extra extra[2];
    unsigned char joined[3 + sizeof number + 4 + sizeof number + 3];
    int i, j;
    p.extras = extra;
    for (i = 0; i < COUNT(lists); i++) {
        p.n_extras = 0;
        for (j = 0; j < 2 && lists[i].at[j] >= 0; j++) {
            extra[j].index = SINKS + lists[i].at[j];
            extra[j].bytes = lists[i].bytes[j];
            extra[j].size = strlen(lists[i].bytes[j]);
            p.n_extras++;
        }
        hash[i] = hash_after(kv, &p, 2);
        for (j = 0; j < i; j++) CHECK_MSG(!is_same_hash(hash[i], hash[j]), "lists %d and %d", j, i);
    }
    /* One extra whose bytes go on as the next extra would: with its index, and with or without its length. */
    for (i = 0; i < 2; i++) {
        size_t n = 0;
        memcpy(joined, "cat", 3);
        n += 3;
        memcpy(joined + n, number, sizeof number);
        n += sizeof number;
        memset(joined + n, 0, 4);
        joined[n] = SINKS + 6;
        n += 4;
        memcpy(joined + n, number, sizeof number);
        joined[n] = 3;
        if (i) n += sizeof number;
        memcpy(joined + n, "dog", 3);
        n += 3;
        extra[0].index = SINKS + 5;
        extra[0].bytes = joined;
        extra[0].size = n;
        p.n_extras = 1;
        CHECK(!is_same_hash(hash_after(kv, &p, 2), hash[6]));
    }
    tkv_destroy(kv);
}

/* The hash is the same on every machine and in later versions, until TKVI_PREFIX_VERSION changes. */
TEST(golden_hash) {
    const tkv_config cfg = config_of(0);
    tkv_prefix_params p = params_of(0, TEXT);
    tkv_cache *kv = create_cache(&cfg);
    char hex[65];
    int i;
    tkv_prefix_hash h = hash_after(kv, &p, 2);
    for (i = 0; i < 32; i++) snprintf(hex + 2 * i, 3, "%02x", (unsigned)h.bytes[i]);
    CHECK_MSG(strcmp(hex, "90a16b0b873803f69be634febf21361a5c1cd69ecbad9d7ebf655548b7ce74a0") == 0, "%s",
              hex);
    tkv_destroy(kv);
}

/* >>wrong values */
static int adopted_tokens(tkv_cache *kv, const tkv_prefix_params *p, const tkv_prefix_store *callbacks,
                          int n_rejected) {
    tkv_prefix_info info;
    CHECK_EQ(tkv_seq_adopt_prefix(kv, p, callbacks, &info), TKV_OK);
    CHECK_EQ(info.n_rejected, n_rejected);
    CHECK_EQ(tkv_get_length(kv, p->seq, TKV_ALL_LAYERS), info.n_tokens);
    CHECK_EQ(tkv_get_length(kv, p->spare, TKV_ALL_LAYERS), 0);
    CHECK_EQ(tkv_seq_reset(kv, p->seq), TKV_OK);
    return info.n_tokens;
}

TEST(wrong_values_end_the_prefix) {
    const tkv_config cfg = config_of(0);
    tkv_cache *a = create_cache(&cfg), *b = create_cache(&cfg);
    tkv_prefix_params p = params_of(0, 1000), q;
    static store s, foreign;
    const tkv_prefix_store callbacks = store_of(&s), others = store_of(&foreign);
    kept_value *second, v;
    size_t i;
    CHECK_EQ(append_to_all_layers(a, 0, 1, 1000, 100), TKV_OK);
    CHECK_EQ(tkv_seq_publish_prefix(a, &p, &callbacks, NULL), TKV_OK);
    CHECK_EQ(s.n, 3);
    CHECK_EQ(adopted_tokens(b, &p, &callbacks, 0), SINKS + 768);
    second = &s.value[1];
    for (i = 0; i < second->n; i += 97) { /* a flipped bit */
        second->bytes[i] ^= (unsigned char)(1u << i % 8);
        CHECK_EQ(adopted_tokens(b, &p, &callbacks, 1), SINKS + 256);
        second->bytes[i] ^= (unsigned char)(1u << i % 8);
    }
    for (i = 0; i < second->n; i += 1 + second->n / 40) { /* a cut */
        v = *second;
        second->n = i;
        CHECK_EQ(adopted_tokens(b, &p, &callbacks, 1), SINKS + 256);
        *second = v;
    }
    v = s.value[1]; /* values at each other's hash */
    s.value[1].bytes = s.value[2].bytes;
    s.value[1].n = s.value[2].n;
    CHECK_EQ(adopted_tokens(b, &p, &callbacks, 1), SINKS + 256);
    s.value[1] = v;
    q = p; /* the value of another tenant */
    q.salt = "tenant";
    q.salt_bytes = 6;
    CHECK_EQ(adopted_tokens(b, &q, &callbacks, 0), 0);
    CHECK_EQ(tkv_seq_publish_prefix(a, &q, &others, NULL), TKV_OK);
    v = s.value[0]; /* under a hash of ours */
    s.value[0].bytes = foreign.value[0].bytes;
    s.value[0].n = foreign.value[0].n;
    CHECK_EQ(adopted_tokens(b, &p, &callbacks, 1), 0);
    s.value[0] = v;
    foreign.fails = 2; /* it claims more than it was asked for */
    CHECK_EQ(adopted_tokens(b, &q, &others, 0), SINKS + 768);
    s.fails = 3;
    CHECK_EQ(adopted_tokens(b, &p, &callbacks, 0), 0);
    s.fails = 4;
    CHECK_EQ(adopted_tokens(b, &p, &callbacks, 0), 0);
    s.given = "nothing";
    s.given_bytes = 7;
    s.fails = 0;
    CHECK_EQ(adopted_tokens(b, &p, &callbacks, 1), 0);
    check_cache(b);
    empty_store(&s);
    empty_store(&foreign);
    tkv_destroy(a);
    tkv_destroy(b);
}

/* Values under the right hash, with right sums, that somebody else wrote: one number or block of the page is wrong. */
TEST(forged_values_are_refused) {
    enum {
        HEAD = 2,
        SAVED = HEAD + TKV_PAGE_TOKENS,
        GOOD,
        PAGE,
        FEWER_STATES,
        MORE_STATES,
        TOKEN,
        NUMBERS,
        BLOCKS,
        LONGER,
        CASES
    };
    const tkv_config cfg = config_of(0);
    tkv_cache *a = create_cache(&cfg), *b = create_cache(&cfg);
    tkv_prefix_params p = params_of(0, 1000);
    static store s;
    const tkv_prefix_store callbacks = store_of(&s);
    kept_value good;
    tkv_load_params load;
    int numbers[SAVED], i;
    CHECK_EQ(append_to_all_layers(a, 0, 1, 1000, 100), TKV_OK);
    CHECK_EQ(tkv_seq_publish_prefix(a, &p, &callbacks, NULL), TKV_OK);
    CHECK_EQ(s.n, 3);
    good = s.value[1];
    memset(&load, 0, sizeof load);
    load.seq = 1;
    load.model = &good.hash;
    load.model_bytes = sizeof good.hash;
    load.tokens = numbers;
    load.token_capacity = SAVED;
    CHECK_EQ(tkv_seq_load(a, &load, good.bytes, good.n, NULL), TKV_OK);
    for (i = GOOD; i < CASES; i++) {
        int changed[SAVED];
        if (i == LONGER) { /* it has a token more than the page */
            const int first = SINKS + TKV_PAGE_TOKENS;
            CHECK_EQ(tkv_seq_reset(a, 1), TKV_OK);
            CHECK_EQ(tkv_seq_copy(a, 0, first, first + TKV_PAGE_TOKENS + 64, 1, first), TKV_OK);
        }
        tkv_save_params save;
        memcpy(changed, numbers, sizeof changed);
        memset(&save, 0, sizeof save);
        save.seq = 1;
        save.model = &good.hash;
        save.model_bytes = sizeof good.hash;
        save.tokens = changed;
        save.n_tokens = i == NUMBERS ? SAVED - 1 : SAVED;
        save.length = i == BLOCKS ? TKV_PAGE_TOKENS - 64 : 0;
        if (i == PAGE) changed[0]++;
        if (i == FEWER_STATES) changed[1] = -1;
        if (i == MORE_STATES) changed[1] = LAYERS + 1;
        if (i == TOKEN) changed[HEAD + 100] ^= 1;
        CHECK_EQ(tkv_seq_save(a, &save, NULL, 0, &s.value[1].n), TKV_OK);
        s.value[1].bytes = (unsigned char *)malloc(s.value[1].n);
        CHECK_EQ(tkv_seq_save(a, &save, s.value[1].bytes, s.value[1].n, NULL), TKV_OK);
        CHECK_EQ(adopted_tokens(b, &p, &callbacks, i != GOOD), SINKS + (i == GOOD ? 768 : 256));
        free(s.value[1].bytes);
    }
    s.value[1] = good;
    check_cache(b);
    empty_store(&s);
    tkv_destroy(a);
    tkv_destroy(b);
}

/* The same for a list of entries or blocks: each number is one that a saved sequence may have, but not a page. A page
 * of other formats is refused, too. */
TEST(forged_lists_are_refused) {
    enum { HEAD = 48, RUN = 48, TURNED = HEAD + 20, FIRST_SLOT = HEAD + 25, END_SLOT = HEAD + 26 };
    static const struct {
        int at, is_of_block, xor_with;
        const char *what;
    } rows[] = {{FIRST_SLOT, 0, 0, "nothing"},
                {TURNED, 0, 1, "turned"},
                {END_SLOT, 0, 64, "end of slots"},
                {FIRST_SLOT, 0, 1, "first slot"}, /* with the end of slots, or the entry has too many */
                {HEAD + 32, 0, 2, "evicted token"},
                {HEAD + 40, 0, 2, "named sink"},
                {8, 1, 1, "first position"}};
    tkv_config cfg = config_of(0);
    tkv_cache *a, *b, *other;
    tkv_prefix_params p = params_of(0, 1000);
    static store s;
    const tkv_prefix_store callbacks = store_of(&s);
    kept_value *second, good;
    tkv_save_params save = save_params(0);
    int i;
    cfg.model.rope.dim = 8;
    cfg.model.rope.base = 1e4f;
    a = create_cache(&cfg);
    b = create_cache(&cfg);
    CHECK_EQ(append_to_all_layers(a, 0, 1, 1000, 100), TKV_OK);
    CHECK_EQ(tkv_seq_publish_prefix(a, &p, &callbacks, NULL), TKV_OK);
    second = &s.value[1];
    for (i = 0; i < COUNT(rows); i++) {
        uint8_t *list = second->bytes + get64(find_in_index(second->bytes, second->n, SAVED_LISTS, 0) + 8);
        uint8_t *at = list + rows[i].at + (rows[i].is_of_block ? HEAD + RUN * (int)get32(list + 40) : 0);
        const int has_end = rows[i].at == FIRST_SLOT && rows[i].xor_with;
        CHECK(get32(list) == 4 && get32(list + 32) == 1); /* blocks; the positions are not the indices */
        *at ^= (uint8_t)rows[i].xor_with;
        if (has_end) list[END_SLOT] ^= 64;
        repair_index(second->bytes, second->n);
        CHECK_MSG(adopted_tokens(b, &p, &callbacks, i > 0) == (i ? SINKS + 256 : SINKS + 768), "%s",
                  rows[i].what);
        *at ^= (uint8_t)rows[i].xor_with;
        if (has_end) list[END_SLOT] ^= 64;
    }
    repair_index(second->bytes, second->n);
    good = *second;
    cfg.tiers.archive = pair_of(TKV_KIVI3, TKV_KIVI3);
    other = create_cache(&cfg);
    CHECK_EQ(append_to_all_layers(other, 0, 1, 1000, 100), TKV_OK);
    CHECK_EQ(tkv_seq_copy(other, 0, SINKS + 256, SINKS + 512, 1, SINKS + 256), TKV_OK);
    save.seq = 1;
    save.model = &good.hash;
    save.model_bytes = sizeof good.hash;
    { /* the numbers of the page and its tokens */
        int numbers[2 + TKV_PAGE_TOKENS];
        numbers[0] = 1;
        numbers[1] = 0;
        memcpy(numbers + 2, tokens + SINKS + 256, sizeof numbers - 2 * sizeof *numbers);
        save.tokens = numbers;
        save.n_tokens = COUNT(numbers);
        CHECK_EQ(tkv_seq_save(other, &save, NULL, 0, &second->n), TKV_OK);
        second->bytes = (unsigned char *)malloc(second->n);
        CHECK_EQ(tkv_seq_save(other, &save, second->bytes, second->n, NULL), TKV_OK);
    }
    CHECK_EQ(adopted_tokens(b, &p, &callbacks, 1), SINKS + 256);
    free(second->bytes);
    *second = good;
    check_cache(b);
    empty_store(&s);
    tkv_destroy(a);
    tkv_destroy(b);
    tkv_destroy(other);
}

/* A wrong value among as many as are asked for at once: no more are asked for. A store need not answer `has`. */
TEST(a_wrong_value_ends_the_questions) {
    const tkv_config cfg = config_of(0);
    tkv_cache *a = create_cache(&cfg), *b = create_cache(&cfg);
    tkv_prefix_params p = params_of(0, 2600);
    tkv_prefix_info info;
    static store s;
    tkv_prefix_store callbacks = store_of(&s);
    callbacks.has = NULL;
    CHECK_EQ(append_to_all_layers(a, 0, 1, 2600, 100), TKV_OK);
    CHECK_EQ(tkv_seq_publish_prefix(a, &p, &callbacks, &info), TKV_OK);
    CHECK(info.n_put == s.n && s.n >= 9);
    CHECK_EQ(adopted_tokens(b, &p, &callbacks, 0), SINKS + 256 * s.n);
    CHECK(s.n_gets == 2 && s.n_asked == s.n + (2600 - SINKS) / 256 - s.n);
    s.value[3].bytes[100] ^= 1;
    s.n_gets = 0;
    CHECK_EQ(adopted_tokens(b, &p, &callbacks, 1), SINKS + 256 * 3);
    CHECK_EQ(s.n_gets, 1);
    p.n_tokens = 200; /* no page: no question */
    s.n_gets = 0;
    CHECK_EQ(adopted_tokens(b, &p, &callbacks, 0), 0);
    CHECK_EQ(s.n_gets, 0);
    empty_store(&s);
    tkv_destroy(a);
    tkv_destroy(b);
}

/* Layers that read the keys and values of another one have no blocks in a page. */
TEST(layers_that_share_are_adopted) {
    tkv_config cfg = config_of(0);
    tkv_layer_config layers[LAYERS];
    tkv_prefix_params p = params_of(0, 1300);
    tkv_prefix_info info;
    static store s;
    const tkv_prefix_store callbacks = store_of(&s);
    tkv_cache *a, *b;
    memset(layers, 0, sizeof layers);
    layers[2].share_kv = 1;
    cfg.layers = layers;
    a = create_cache(&cfg);
    b = create_cache(&cfg);
    CHECK_EQ(append_to_all_layers(a, 0, 1, 1300, 100), TKV_OK);
    CHECK_EQ(tkv_seq_publish_prefix(a, &p, &callbacks, &info), TKV_OK);
    CHECK_EQ(info.n_put, 4);
    CHECK_EQ(tkv_seq_adopt_prefix(b, &p, &callbacks, &info), TKV_OK);
    CHECK_EQ(info.n_pages, 4);
    CHECK_EQ(tkv_seq_fork(a, 0, 1, info.n_tokens), TKV_OK);
    check_attention(a, 1, b, 0);
    CHECK_EQ(tkv_seq_publish_prefix(a, &p, NULL, &info), TKV_OK);
    CHECK_EQ(info.n_pages, 4);
    check_cache(b);
    empty_store(&s);
    tkv_destroy(a);
    tkv_destroy(b);
}

/* >>ages, states, paths */
TEST(pages_of_other_ages_join) {
    const tkv_config cfg = config_of(0);
    tkv_cache *a = create_cache(&cfg), *b = create_cache(&cfg);
    tkv_prefix_params p = params_of(0, 1300);
    tkv_prefix_info info;
    static store s;
    const tkv_prefix_store callbacks = store_of(&s);
    tkv_layer_info l;
    CHECK_EQ(append_to_all_layers(a, 0, 1, 460, 20), TKV_OK);
    CHECK_EQ(tkv_seq_publish_prefix(a, &p, &callbacks, &info), TKV_OK); /* page 0, of the warm tier */
    CHECK_EQ(info.n_put, 1);
    CHECK_EQ(append_to_all_layers(a, 0, 1, 840, 20), TKV_OK);
    CHECK_EQ(tkv_seq_publish_prefix(a, &p, &callbacks, &info), TKV_OK); /* the others, some of the archive */
    CHECK_EQ(info.n_put, 3);
    CHECK_EQ(tkv_seq_adopt_prefix(b, &p, &callbacks, &info), TKV_OK);
    CHECK_EQ(info.n_pages, 4);
    check_cache(b);
    CHECK_EQ(tkv_get_layer(b, 0, 0, &l), TKV_OK);
    CHECK_EQ(l.tokens[TKV_TIER_HOT], SINKS);
    CHECK_EQ(l.tokens[TKV_TIER_WARM], 320); /* three blocks of page 0, two of the others: by their formats */
    CHECK_EQ(l.tokens[TKV_TIER_ARCHIVE], 704);
    CHECK_EQ(append_to_all_layers(b, 0, 1, 400, 20), TKV_OK); /* they age from there */
    check_cache(b);
    CHECK_EQ(tkv_get_layer(b, 0, 0, &l), TKV_OK);
    CHECK(l.tokens[TKV_TIER_ARCHIVE] > 800);
    empty_store(&s);
    tkv_destroy(a);
    tkv_destroy(b);
}

TEST(a_prefix_ends_where_states_are) {
    tkv_config cfg = config_of(0);
    tkv_cache *a, *b;
    tkv_prefix_params p = params_of(0, 1100);
    tkv_prefix_info info;
    static store s;
    const tkv_prefix_store callbacks = store_of(&s);
    char state[40];
    size_t n = 0;
    int i;
    cfg.limits.max_states = 8;
    cfg.limits.state_bytes = 1 << 16;
    a = create_cache(&cfg);
    b = create_cache(&cfg);
    CHECK_EQ(append_to_all_layers(a, 0, 1, 1100, 100), TKV_OK);
    for (i = 0; i < 2; i++) /* after pages 1 and 2; layer 2 has none of the second */
        CHECK_EQ(tkv_seq_put_state(a, 0, i, SINKS + 512, i ? "two" : "one", 4), TKV_OK);
    CHECK_EQ(tkv_seq_put_state(a, 0, 0, SINKS + 768, "half", 5), TKV_OK);
    CHECK_EQ(tkv_seq_publish_prefix(a, &p, &callbacks, &info), TKV_OK);
    CHECK_EQ(info.n_put, 3);
    CHECK_EQ(tkv_seq_adopt_prefix(b, &p, &callbacks, &info), TKV_OK);
    CHECK_EQ(info.n_tokens, SINKS + 512);
    CHECK_EQ(info.n_pages, 2);
    check_cache(b);
    CHECK_EQ(tkv_get_length(b, 0, TKV_ALL_LAYERS), SINKS + 512);
    CHECK_EQ(tkv_seq_find_state(b, 0, TKV_UNLIMITED), SINKS + 512);
    CHECK_EQ(tkv_seq_get_state(b, 0, 1, SINKS + 512, state, sizeof state, &n), TKV_OK);
    CHECK(n == 4 && strcmp(state, "two") == 0);
    CHECK_EQ(tkv_seq_get_state(b, p.spare, 1, 512, state, sizeof state, &n), TKV_ERR_RANGE);
    empty_store(&s);
    tkv_destroy(a);
    tkv_destroy(b);
}

/* A page without the states of all stateful layers, here or where it was published, ends no prefix. */
TEST(no_prefix_without_its_states) {
    tkv_config cfg = config_of(0);
    tkv_prefix_params p = params_of(0, 800);
    tkv_prefix_info info;
    static store s;
    const tkv_prefix_store callbacks = store_of(&s);
    int kind;
    cfg.limits.max_states = 8;
    cfg.limits.state_bytes = 1 << 16;
    for (kind = 0; kind < 4; kind++) {
        tkv_cache *a = create_cache(&cfg), *b = create_cache(&cfg);
        CHECK_EQ(append_to_all_layers(a, 0, 1, 800, 100), TKV_OK);
        if (kind == 1) /* states elsewhere only */
            CHECK_EQ(tkv_seq_put_state(a, 0, 0, 100, "x", 1), TKV_OK);
        if (kind == 2) /* of one of two layers */
            CHECK_EQ(tkv_seq_put_state(a, 0, 0, SINKS + 256, "x", 1), TKV_OK);
        if (kind == 2) CHECK_EQ(tkv_seq_put_state(a, 0, 1, 100, "x", 1), TKV_OK);
        CHECK_EQ(tkv_seq_publish_prefix(a, &p, &callbacks, &info), TKV_OK);
        CHECK_EQ(info.n_put, 2);
        if (kind == 3) CHECK_EQ(tkv_seq_put_state(b, 1, 0, 7, "x", 1), TKV_OK); /* the adopter is hybrid */
        CHECK_EQ(tkv_seq_adopt_prefix(b, &p, &callbacks, &info), TKV_OK);
        CHECK_MSG(info.n_pages == (kind == 0 ? 2 : 0), "kind %d: %d pages", kind, info.n_pages);
        CHECK_EQ(tkv_get_length(b, 0, TKV_ALL_LAYERS), info.n_tokens);
        CHECK_EQ(info.bytes > 0, kind == 0);
        check_cache(b);
        empty_store(&s);
        tkv_destroy(a);
        tkv_destroy(b);
    }
}

/* Full memory for states: the state of a later page takes the place of an older one, whose page then ends no prefix. A
 * value whose states do not fit ends the prefix, too. */
TEST(states_of_a_page_go_for_those_of_the_next) {
    enum { LARGE = 1000, SMALL = 8, LARGE_BYTES = 64 + 1024, SMALL_BYTES = 64 + 64 };
    static const char bytes[LARGE] = "a state";
    int kind;
    for (kind = 0; kind < 3; kind++) {
        tkv_config cfg = config_of(0);
        tkv_prefix_params p = params_of(0, 1300);
        tkv_prefix_info info;
        static store s;
        const tkv_prefix_store callbacks = store_of(&s);
        const int first = SINKS + 256 * (kind == 1 ? 2 : 1); /* the page with all states that is hit */
        tkv_cache *a, *b;
        cfg.limits.max_states = 8;
        cfg.limits.state_bytes = 1 << 16;
        a = create_cache(&cfg);
        CHECK_EQ(append_to_all_layers(a, 0, 1, 1300, 100), TKV_OK);
        if (kind == 1) {
            CHECK_EQ(tkv_seq_put_state(a, 0, 0, SINKS + 256, bytes, SMALL), TKV_OK);
            CHECK_EQ(tkv_seq_put_state(a, 0, 1, SINKS + 256, bytes, SMALL), TKV_OK);
        }
        CHECK_EQ(tkv_seq_put_state(a, 0, 0, first, bytes, LARGE), TKV_OK);
        CHECK_EQ(tkv_seq_put_state(a, 0, 1, first, bytes, SMALL), TKV_OK);
        CHECK_EQ(tkv_seq_put_state(a, 0, 0, first + 256, bytes, LARGE), TKV_OK); /* of one of two layers */
        CHECK_EQ(tkv_seq_publish_prefix(a, &p, &callbacks, &info), TKV_OK);
        CHECK_EQ(info.n_put, 4);
        /* twice those of a page, in the spare sequence and in the one that adopts; and the small ones before them */
        cfg.limits.state_bytes = 2 * (LARGE_BYTES + SMALL_BYTES) + (kind == 1 ? 2 * SMALL_BYTES : 0);
        if (kind == 2) cfg.limits.state_bytes = LARGE_BYTES;
        b = create_cache(&cfg);
        CHECK_EQ(tkv_seq_adopt_prefix(b, &p, &callbacks, &info), TKV_OK);
        CHECK_MSG(info.n_pages == (kind == 1), "kind %d: %d pages", kind, info.n_pages);
        CHECK_EQ(info.n_tokens, kind == 1 ? SINKS + 256 : 0);
        CHECK_EQ(info.n_rejected, kind == 2);
        CHECK_EQ(tkv_get_length(b, 0, TKV_ALL_LAYERS), info.n_tokens);
        CHECK_EQ(tkv_seq_find_state(b, 0, TKV_UNLIMITED), info.n_tokens);
        check_cache(b);
        empty_store(&s);
        tkv_destroy(a);
        tkv_destroy(b);
    }
}

/* What is not on the path of the plan ends what is published. */
TEST(only_the_path_is_published) {
    static store s;
    const tkv_prefix_store callbacks = store_of(&s);
    int kind;
    for (kind = 0; kind < 9; kind++) {
        tkv_config cfg = config_of(0);
        tkv_level levels[2];
        uint64_t victims[3] = {0};
        int i;
        tkv_prefix_params p = params_of(0, 1100);
        tkv_prefix_info info;
        tkv_cache *kv;
        cfg.model.rope.dim = 8;
        cfg.model.rope.base = 1e4f;
        memset(levels, 0, sizeof levels);
        levels[0].warm = levels[1].warm = pair_of(TKV_KIVI4, TKV_KIVI4);
        levels[0].archive = pair_of(TKV_KIVI3, TKV_KIVI3);
        levels[1].archive = pair_of(TKV_KIVI2, TKV_KIVI2);
        if (kind == 4) cfg.budget.ladder = levels, cfg.budget.n_levels = 2;
        if (kind == 7) cfg.evict.policy = TKV_EVICT_SLIDING;
        kv = create_cache(&cfg);
        if (kind == 4) CHECK_EQ(tkv_set_level(kv, 1), TKV_OK);
        CHECK_EQ(append_to_all_layers(kv, 0, 1, 100, 100), TKV_OK);
        if (kind == 8) CHECK_EQ(tkv_seq_set_sinks(kv, 0, 50, 1, 1), TKV_OK); /* its block stays exact */
        CHECK_EQ(append_to_all_layers(kv, 0, 1, 1000, 100), TKV_OK);
        if (kind == 1) CHECK_EQ(tkv_seq_remove(kv, 0, 600, 601), TKV_OK);
        if (kind == 2) CHECK_EQ(tkv_seq_shift(kv, 0, 300, TKV_UNLIMITED, 7), TKV_OK);
        if (kind == 3) CHECK_EQ(tkv_seq_remove(kv, 0, 0, 4), TKV_OK);
        if (kind == 5)
            CHECK_EQ(tkv_seq_shift(kv, 0, SINKS + 256, TKV_UNLIMITED, 7), TKV_OK); /* a whole page */
        if (kind == 6) CHECK_EQ(tkv_seq_discard(kv, 0, 100, NULL), TKV_OK);
        if (kind == 7) { /* two blocks become one, which lists the indices of its tokens */
            for (i = SINKS; i < SINKS + 128; i += 2) add_to_mask(victims, i);
            CHECK_EQ(evict_tokens(kv, 0, 1, victims, 192), TKV_OK);
        }
        CHECK_EQ(tkv_seq_publish_prefix(kv, &p, &callbacks, &info), TKV_OK);
        CHECK_MSG(info.n_pages == (kind == 0   ? 3
                                   : kind == 1 ? 2
                                   : kind == 2 ? 1
                                   : kind == 5 ? 1
                                               : 0),
                  "kind %d: %d pages", kind, info.n_pages);
        check_cache(kv);
        tkv_destroy(kv);
        empty_store(&s);
    }
}

/* Blocks of another level are on the path if their formats are: those of level 0, by way of its warm format. */
TEST(blocks_of_another_level) {
    static store s;
    const tkv_prefix_store callbacks = store_of(&s);
    int kind;
    for (kind = 0; kind < 3; kind++) {
        tkv_config cfg = config_of(0);
        tkv_level levels[2];
        tkv_prefix_params p = params_of(0, 1400);
        tkv_prefix_info info;
        tkv_cache *a, *b;
        memset(levels, 0, sizeof levels);
        levels[0].warm = levels[1].warm = levels[1].archive = pair_of(TKV_KIVI4, TKV_KIVI4);
        levels[0].archive = pair_of(TKV_KIVI2, TKV_KIVI2);
        levels[1].from_tokens = 10000; /* levels by length may have more bits later */
        if (kind == 1) levels[1].warm = pair_of(TKV_Q8, TKV_Q8); /* by way of another format */
        if (kind == 2) {                                         /* level 0 has no warm format on the way */
            levels[0].warm_tokens = TKV_OFF;
            levels[1].archive = levels[0].archive;
        }
        cfg.budget.ladder = levels;
        cfg.budget.n_levels = 2;
        a = create_cache(&cfg);
        b = create_cache(&cfg);
        CHECK_EQ(tkv_set_level(a, 1), TKV_OK);
        CHECK_EQ(append_to_all_layers(a, 0, 1, 1400, 20), TKV_OK);
        CHECK_EQ(tkv_seq_publish_prefix(a, &p, &callbacks, &info), TKV_OK);
        CHECK_MSG(info.n_put == (kind ? 0 : 4), "kind %d: %d pages", kind, info.n_put);
        CHECK_EQ(tkv_seq_adopt_prefix(b, &p, &callbacks, &info), TKV_OK);
        CHECK_EQ(info.n_pages, kind ? 0 : 4);
        CHECK_EQ(info.n_rejected, 0);
        check_cache(b);
        tkv_destroy(a);
        tkv_destroy(b);
        empty_store(&s);
    }
}

/* Archived pages are adopted where a budget has a ladder, too, and published again. */
TEST(caches_with_a_ladder) {
    tkv_config cfg = config_of(0);
    tkv_level levels[2];
    tkv_prefix_params p = params_of(0, 1400);
    tkv_prefix_info info;
    static store s, again;
    const tkv_prefix_store callbacks = store_of(&s), others = store_of(&again);
    tkv_cache *a, *b;
    memset(levels, 0, sizeof levels);
    levels[0].warm = levels[1].warm = pair_of(TKV_KIVI4, TKV_KIVI4);
    levels[0].archive = pair_of(TKV_KIVI3, TKV_KIVI3);
    levels[1].archive = pair_of(TKV_KIVI2, TKV_KIVI2);
    cfg.budget.ladder = levels;
    cfg.budget.n_levels = 2;
    a = create_cache(&cfg);
    b = create_cache(&cfg);
    CHECK_EQ(append_to_all_layers(a, 0, 1, 1400, 20), TKV_OK);
    CHECK_EQ(tkv_seq_publish_prefix(a, &p, &callbacks, &info), TKV_OK);
    CHECK_EQ(info.n_put, 4);
    CHECK_EQ(tkv_seq_adopt_prefix(b, &p, &callbacks, &info), TKV_OK);
    CHECK_EQ(info.n_pages, 4);
    check_cache(b);
    CHECK_EQ(tkv_seq_publish_prefix(b, &p, &others, &info), TKV_OK);
    CHECK_EQ(info.n_put, 4);
    empty_store(&s);
    empty_store(&again);
    tkv_destroy(a);
    tkv_destroy(b);
}

/* Under a budget, what a page needs can come from its own blocks: then it is not published. */
TEST(a_budget_spoils_no_page) {
    tkv_config cfg = config_of(0);
    tkv_level levels[2];
    tkv_prefix_params p = params_of(0, 1176);
    static store s;
    const tkv_prefix_store callbacks = store_of(&s);
    tkv_cache *fresh;
    int spare_bytes, n_put = 0, n_short = 0;
    memset(levels, 0, sizeof levels);
    levels[0].archive = pair_of(TKV_KIVI4, TKV_KIVI4);
    levels[1].archive = pair_of(TKV_KIVI2, TKV_KIVI2);
    levels[0].warm = levels[1].warm = levels[0].archive;
    levels[0].warm_tokens = levels[1].warm_tokens = TKV_OFF;
    levels[0].hot_tokens = levels[1].hot_tokens = 128;
    cfg.tiers.warm_tokens = TKV_OFF;
    cfg.tiers.archive = levels[0].archive;
    cfg.importance.sample_every = 32;
    cfg.budget.bytes = (size_t)1 << 26;
    cfg.budget.ladder = levels;
    cfg.budget.n_levels = 2;
    fresh = create_cache(&cfg);
    for (spare_bytes = 0; spare_bytes < 120 * 1024; spare_bytes += 4096) {
        tkv_cache *a = create_cache(&cfg);
        tkv_memory_info m;
        tkv_prefix_info info, found;
        CHECK_EQ(append_to_all_layers(a, 0, 1, 1176, 64), TKV_OK);
        CHECK_EQ(tkv_seq_flush(a, 0, TKV_FLUSH_FULL), TKV_OK);
        CHECK_EQ(tkv_get_memory(a, &m), TKV_OK);
        CHECK_EQ(tkv_set_budget(a, m.total + (size_t)spare_bytes), TKV_OK);
        n_short += tkv_seq_publish_prefix(a, &p, &callbacks, &info) != TKV_OK || info.n_pages < 4;
        check_cache(a);
        tkv_destroy(a);
        CHECK_EQ(tkv_seq_adopt_prefix(fresh, &p, &callbacks, &found), TKV_OK);
        CHECK_MSG(found.n_pages == s.n && !found.n_rejected, "%d bytes: %d of %d pages", spare_bytes,
                  found.n_pages, s.n);
        CHECK_EQ(tkv_seq_reset(fresh, 0), TKV_OK);
        n_put += s.n;
        empty_store(&s);
    }
    CHECK(n_put > 20 && n_short > 0);
    tkv_destroy(fresh);
}

/* >>without a store */
/* Appends a text to a sequence of a cache whose keys and values depend on token numbers and indices alone. */
static void append_text(tkv_cache *kv, int seq, const int *text, int n) {
    int t = tkv_get_length(kv, seq, TKV_ALL_LAYERS);
    for (; t < n; t++) {
        int layer;
        for (layer = 0; layer < LAYERS; layer++) {
            fill_rows(text[t], layer, t, 1, k_in, v_in);
            CHECK_EQ(tkv_append(kv, seq, layer, k_in, v_in, 1), TKV_OK);
        }
    }
}

static int found_here(tkv_cache *kv, int seq, const int *text, int n) {
    tkv_prefix_params p = params_of(seq, n);
    tkv_prefix_info info;
    p.tokens = text;
    p.spare = TKV_NO_SEQ; /* none is needed */
    CHECK_EQ(tkv_seq_adopt_prefix(kv, &p, NULL, &info), TKV_OK);
    CHECK_EQ(info.n_tokens, info.n_pages ? SINKS + TKV_PAGE_TOKENS * info.n_pages : 0);
    CHECK_EQ(tkv_get_length(kv, seq, TKV_ALL_LAYERS), info.n_tokens);
    CHECK(info.bytes == 0 && info.n_put == 0 && info.n_rejected == 0);
    check_cache(kv);
    return info.n_pages;
}

static int publish_here(tkv_cache *kv, int seq, const int *text, int n, int *n_pages) {
    tkv_prefix_params p = params_of(seq, n);
    tkv_prefix_info info;
    p.tokens = text;
    CHECK_EQ(tkv_seq_publish_prefix(kv, &p, NULL, &info), TKV_OK);
    CHECK(info.bytes == 0 && info.n_rejected == 0);
    if (n_pages) *n_pages = info.n_pages;
    check_cache(kv);
    return info.n_put;
}

/* What was adopted has the bits of a sequence that has read the text, shares its blocks, and goes on like it. */
TEST(sequences_find_each_other) {
    int has_tables;
    for (has_tables = 0; has_tables < 2; has_tables++) {
        const tkv_config cfg = config_of(has_tables);
        tkv_cache *kv = create_with_tables(&cfg), *twin = create_with_tables(&cfg);
        static int text[TEXT], other[TEXT];
        tkv_memory_info before, after;
        tkv_prefix_params p;
        tkv_prefix_info info;
        int t, n_pages = 0, n_first, put;
        for (t = 0; t < TEXT; t++) text[t] = 1000 + t % 700, other[t] = t < 900 ? text[t] : 5 + t % 300;
        append_text(kv, 0, text, 1500);
        CHECK_EQ(found_here(kv, 1, text, 1500), 0); /* not yet published */
        put = publish_here(kv, 0, text, 1500, &n_pages);
        CHECK(put == n_pages && n_pages >= 4);
        CHECK_EQ(publish_here(kv, 0, text, 1500, NULL), 0);
        CHECK_EQ(tkv_get_memory(kv, &before), TKV_OK);
        n_first = n_pages;
        CHECK_EQ(found_here(kv, 1, text, 1500), n_pages);
        CHECK_EQ(tkv_get_memory(kv, &after), TKV_OK);
        CHECK_EQ(after.tier[TKV_TIER_ARCHIVE].codes, before.tier[TKV_TIER_ARCHIVE].codes);
        CHECK(after.total < before.total + before.total / 4);
        append_text(twin, 0, text, 1500);
        CHECK_EQ(tkv_seq_fork(twin, 0, 1, SINKS + TKV_PAGE_TOKENS * n_pages), TKV_OK);
        compare_sequences(kv, 1, twin, 1);
        append_text(kv, 1, text, 1800);
        append_text(twin, 1, text, 1800);
        compare_sequences(kv, 1, twin, 1);
        check_attention(kv, 1, twin, 1);
        CHECK_EQ(publish_here(kv, 1, text, SINKS + 256 * n_pages, NULL), n_pages); /* adopted ones too */
        CHECK_EQ(tkv_seq_reset(kv, 0), TKV_OK);
        CHECK_EQ(found_here(kv, 2, other, TEXT), 3);
        append_text(kv, 2, other, 2000);
        CHECK(publish_here(kv, 2, other, 2000, &n_pages) > 0);
        CHECK_EQ(found_here(kv, 0, other, TEXT), n_pages);
        CHECK_EQ(tkv_seq_reset(kv, 0), TKV_OK);
        CHECK_EQ(found_here(kv, 0, text, TEXT),
                 n_first); /* of the first text: sequence 1 has published no more */
        CHECK_EQ(tkv_seq_reset(kv, 0), TKV_OK);
        p = params_of(0, TEXT); /* another tenant finds nothing */
        p.tokens = text;
        p.spare = 2; /* it has tokens, but no spare sequence is needed */
        p.salt = "tenant";
        p.salt_bytes = 6;
        CHECK_EQ(tkv_seq_adopt_prefix(kv, &p, NULL, &info), TKV_OK);
        CHECK_EQ(info.n_pages, 0);
        tkv_destroy(kv);
        tkv_destroy(twin);
    }
}

/* A name is gone as soon as one of its tokens is. */
TEST(names_go_with_their_tokens) {
    int kind;
    for (kind = 0; kind < 9; kind++) {
        tkv_config cfg = config_of(0);
        static int text[1400], changed[1400];
        int t, n_pages = 0, want;
        tkv_cache *kv;
        cfg.model.rope.dim = 8;
        cfg.model.rope.base = 1e4f;
        cfg.host.wipe_freed = kind % 2;
        kv = create_cache(&cfg);
        for (t = 0; t < 1400; t++) text[t] = changed[t] = 100 + t;
        append_text(kv, 0, text, 1400);
        publish_here(kv, 0, text, 1400, &n_pages);
        CHECK_EQ(n_pages, 5);
        want = kind == 0 ? 2 : kind == 1 ? 1 : kind == 2 ? 0 : kind == 3 ? 1 : kind == 4 ? 3 : 0;
        if (kind == 0) CHECK_EQ(tkv_seq_truncate(kv, 0, SINKS + 767), TKV_OK);
        if (kind == 1) CHECK_EQ(tkv_seq_remove(kv, 0, SINKS + 256, SINKS + 257), TKV_OK);
        if (kind == 2) CHECK_EQ(tkv_seq_reset(kv, 0), TKV_OK);
        if (kind == 3) CHECK_EQ(tkv_seq_truncate(kv, 0, SINKS + 256), TKV_OK);
        if (kind == 4) CHECK_EQ(tkv_seq_shift(kv, 0, SINKS + 800, TKV_UNLIMITED, 9), TKV_OK);
        if (kind == 5) CHECK_EQ(tkv_seq_fork(kv, 1, 0, TKV_UNLIMITED), TKV_OK); /* of an empty one */
        if (kind == 6) CHECK_EQ(tkv_seq_keep(kv, 0, 1, NULL, 0), TKV_OK);
        if (kind == 7) CHECK_EQ(tkv_seq_truncate(kv, 0, 0), TKV_OK);
        if (kind == 8) {
            CHECK_EQ(tkv_seq_begin(kv, 0), TKV_OK); /* a sequence in a step is not found */
            CHECK_EQ(found_here(kv, 1, text, 1400), 0);
            CHECK_EQ(tkv_seq_abort(kv, 0), TKV_OK);
            want = 5;
        }
        /* the same length again, with other tokens behind the cut */
        for (t = tkv_get_length(kv, 0, TKV_ALL_LAYERS); t < 1400; t++) changed[t] = 5000 + t;
        append_text(kv, 0, changed, 1400);
        CHECK_MSG(found_here(kv, 1, text, 1400) == want, "kind %d: %d pages", kind,
                  (tkv_get_length(kv, 1, TKV_ALL_LAYERS) - SINKS) / 256);
        tkv_destroy(kv);
    }
}

/* Pages of several ages, states, salts: the longest prefix is found, with the tiers and states of its sequence. */
TEST(the_longest_prefix_is_found) {
    tkv_config cfg = config_of(0);
    tkv_prefix_params p = params_of(0, 400);
    tkv_prefix_info info;
    char state[8];
    size_t size;
    tkv_cache *kv;
    cfg.tiers.hot_tokens = 64;
    cfg.limits.max_append = 64;
    cfg.limits.max_states = 4;
    kv = create_cache(&cfg);
    CHECK_EQ(append_to_all_layers(kv, 0, 1, 400, 64), TKV_OK);
    CHECK_EQ(append_to_all_layers(kv, 1, 1, 1900, 64), TKV_OK);
    CHECK_EQ(tkv_seq_publish_prefix(kv, &p, NULL, &info), TKV_OK);
    CHECK_EQ(info.n_pages, 1);
    p.seq = 1;
    p.n_tokens = 1900;
    CHECK_EQ(tkv_seq_publish_prefix(kv, &p, NULL, &info), TKV_OK);
    CHECK(info.n_pages >= 6);
    CHECK_EQ(found_here(kv, 2, tokens, 1900), info.n_pages); /* check_cache looks at the tiers */
    compare_sequences(kv, 2, kv, 2);
    CHECK_EQ(tkv_seq_reset(kv, 2), TKV_OK);
    p.salt = "tenant"; /* takes the names of the other one */
    p.salt_bytes = 6;
    p.n_tokens = 300;
    CHECK_EQ(tkv_seq_publish_prefix(kv, &p, NULL, &info), TKV_OK);
    CHECK_EQ(info.n_put, 1);
    CHECK_EQ(found_here(kv, 2, tokens, 1900), 1);
    CHECK_EQ(tkv_seq_reset(kv, 2), TKV_OK);
    p = params_of(1, 1900);
    CHECK_EQ(tkv_seq_publish_prefix(kv, &p, NULL, &info), TKV_OK);
    CHECK_EQ(tkv_seq_put_state(kv, 1, 0, SINKS + 512, "states", 7), TKV_OK);
    CHECK_EQ(found_here(kv, 2, tokens, 1900), 2); /* as far as there is a state */
    CHECK_EQ(tkv_seq_get_state(kv, 2, 0, SINKS + 512, state, sizeof state, &size), TKV_OK);
    CHECK(size == 7 && strcmp(state, "states") == 0);
    CHECK_EQ(tkv_seq_reset(kv, 2), TKV_OK);
    p.seq = 0; /* a sequence before it, without the state */
    CHECK_EQ(tkv_seq_reset(kv, 0), TKV_OK);
    CHECK_EQ(append_to_all_layers(kv, 0, 1, 1900, 64), TKV_OK);
    CHECK_EQ(tkv_seq_publish_prefix(kv, &p, NULL, &info), TKV_OK);
    CHECK(info.n_pages >= 6);
    CHECK_EQ(found_here(kv, 2, tokens, 1900), 2);
    tkv_destroy(kv);
}

typedef struct scanned_memory { /* an allocator in an array */
    unsigned char bytes[1 << 21];
    size_t used;
} scanned_memory;

static void *scanned_alloc(void *user, size_t n, size_t align) {
    scanned_memory *m = (scanned_memory *)user;
    void *out;
    while ((uintptr_t)(m->bytes + m->used) % align) m->used++;
    out = m->bytes + m->used;
    m->used += n;
    CHECK(m->used <= sizeof m->bytes);
    return out;
}

static void scanned_release(void *user, void *p, size_t n, size_t align) {
    (void)user, (void)p, (void)n, (void)align;
}

static int count_numbers(const scanned_memory *m, int first, int end) {
    size_t i;
    int n = 0, x;
    for (i = 0; i + sizeof x <= m->used; i++) {
        memcpy(&x, m->bytes + i, sizeof x);
        n += x >= first && x < end;
    }
    return n;
}

/* With wipe_freed no number of a token stays behind its name. */
TEST(forgotten_names_are_wiped) {
    enum { FIRST = 0x2c0de000 };
    static scanned_memory memory;
    static int text[1400];
    tkv_config cfg = config_of(0);
    tkv_prefix_params p = params_of(0, 300);
    tkv_prefix_info info;
    tkv_cache *kv;
    int t;
    memory.used = 0;
    for (t = 0; t < 1400; t++) text[t] = FIRST + t;
    cfg.host.wipe_freed = 1;
    cfg.host.allocator.user = &memory;
    cfg.host.allocator.alloc = scanned_alloc;
    cfg.host.allocator.release = scanned_release;
    kv = create_cache(&cfg);
    CHECK_EQ(append_to_all_layers(kv, 0, 1, 1400, 64), TKV_OK);
    CHECK(publish_here(kv, 0, text, 1400, NULL) >= 4);
    CHECK(count_numbers(&memory, FIRST, FIRST + 1400) >= 4 * 256);
    p.tokens = text;
    p.salt = "tenant"; /* one page takes the names of all */
    p.salt_bytes = 6;
    CHECK_EQ(tkv_seq_publish_prefix(kv, &p, NULL, &info), TKV_OK);
    CHECK_EQ(info.n_put, 1);
    CHECK_EQ(count_numbers(&memory, FIRST, FIRST + 1400), SINKS + 256);
    CHECK(publish_here(kv, 0, text, 1400, NULL) >= 4);
    CHECK(count_numbers(&memory, FIRST, FIRST + 1400) >= 4 * 256);
    CHECK_EQ(tkv_seq_truncate(kv, 0, 300), TKV_OK);
    CHECK_EQ(count_numbers(&memory, FIRST, FIRST + 1400), SINKS + 256);
    CHECK_EQ(tkv_seq_reset(kv, 0), TKV_OK);
    CHECK_EQ(count_numbers(&memory, FIRST, FIRST + 1400), 0);
    tkv_destroy(kv);
}

/* Random texts from a tree of pages, in sequences that come, grow, are cut, publish, adopt and go. Each adoption is
 * compared with an array of texts: it has the bits of its own text, and finds all that is published. */
TEST(random_prefixes) {
    enum { TALKS = 6, MOST = 1100, STEPS = 400 };
    static int text[TALKS][MOST], want[MOST];
    tkv_config cfg = config_of(0);
    tkv_cache *kv, *plain;
    tkv_rng rng = tkv_rng_seed(9);
    int named[TALKS], len[TALKS], i, s, t, step, n_found = 0, n_missed = 0, n_compared = 0;
    memset(named, 0, sizeof named);
    memset(len, 0, sizeof len);
    cfg.limits.max_seqs = TALKS + 1;
    cfg.tiers.hot_tokens = 64;
    cfg.tiers.warm_tokens = TKV_OFF;
    kv = create_cache(&cfg);
    plain = create_cache(&cfg);
    for (step = 0; step < STEPS; step++) {
        s = (int)tkv_rng_below(&rng, TALKS);
        if (!len[s]) {
            int best = 0, found;
            const int n = 300 + (int)tkv_rng_below(&rng, MOST - 300);
            int way = 0;
            for (t = 0; t < MOST; t++) { /* a way through a tree: two branches at each fork */
                if (t % 200 == 30) way = 2 * way + (int)tkv_rng_below(&rng, 2);
                text[s][t] = 10 + way * MOST + t;
            }
            for (i = 0; i < TALKS; i++) {
                int page = 0;
                while (page < named[i] && SINKS + 256 * (page + 1) <= n &&
                       memcmp(text[i], text[s], (size_t)(SINKS + 256 * (page + 1)) * sizeof **text) == 0)
                    page++;
                best = i != s && page > best ? page : best;
            }
            found = found_here(kv, s, text[s], n);
            CHECK_MSG(found == best, "step %d: %d pages of %d", step, found, best);
            n_found += found > 0;
            n_missed += found == 0;
            named[s] = 0; /* until it is published */
            append_text(kv, s, text[s], n);
            len[s] = n;
            CHECK_EQ(tkv_seq_reset(plain, 0), TKV_OK);
            append_text(plain, 0, text[s], n);
            if (n - SINKS - 256 * found >= 128) { /* else plain has some of the prefix in its hot tail */
                check_attention(kv, s, plain, 0);
                n_compared += found > 0;
            }
        } else if (tkv_rng_below(&rng, 2) == 0) {
            publish_here(kv, s, text[s], len[s], &named[s]);
        } else if (tkv_rng_below(&rng, 3) == 0) {
            len[s] = (int)tkv_rng_below(&rng, len[s]);
            CHECK_EQ(tkv_seq_truncate(kv, s, len[s]), TKV_OK);
            while (named[s] && SINKS + 256 * named[s] > len[s]) named[s]--;
            for (t = len[s]; t < MOST; t++) text[s][t] = 7000000 + step * MOST + t; /* goes on elsewhere */
            memcpy(want, text[s], sizeof want);
            append_text(kv, s, want, len[s] + 100 < MOST ? len[s] + 100 : MOST);
            len[s] = len[s] + 100 < MOST ? len[s] + 100 : MOST;
        } else {
            CHECK_EQ(tkv_seq_reset(kv, s), TKV_OK);
            len[s] = named[s] = 0;
        }
        check_cache(kv);
    }
    CHECK_MSG(n_found > 20 && n_missed > 5 && n_compared > 10, "%d, %d, %d", n_found, n_missed, n_compared);
    tkv_destroy(kv);
    tkv_destroy(plain);
}

static int publish_pages(tkv_cache *kv, int n, tkv_status want) {
    const tkv_prefix_params p = params_of(0, n);
    tkv_prefix_info info;
    CHECK_EQ(tkv_seq_publish_prefix(kv, &p, NULL, &info), want);
    return info.n_pages;
}

/* Names are of the heap and of the budget, or there are none; then nothing has changed. */
TEST(names_have_no_memory) {
    tkv_config cfg = config_of(0);
    counting_allocator memory;
    tkv_prefix_params p = params_of(0, 1100);
    tkv_prefix_info info;
    tkv_memory_info m;
    tkv_cache *kv;
    tkv_status st = TKV_ERR_NOMEM;
    tkv_level levels[2];
    void *arena;
    size_t bytes = 0;
    int i, n_short = 0, n_whole = 0, n_found, n_tokens;
    memset(&memory, 0, sizeof memory);
    cfg.host.allocator = counting_allocator_of(&memory);
    for (i = 1; st && i < 100; i++) {
        snapshot before;
        kv = create_cache(&cfg);
        CHECK_EQ(append_to_all_layers(kv, 0, 1, 1100, 100), TKV_OK);
        before = snapshot_of(kv);
        memory.fail_at = i;
        st = tkv_seq_publish_prefix(kv, &p, NULL, &info);
        memory.fail_at = 0;
        CHECK(st == TKV_OK || (st == TKV_ERR_NOMEM && info.n_put == 0));
        check_unchanged(kv, &before, "a failed publication");
        CHECK_EQ(found_here(kv, 1, p.tokens, 1100), st ? 0 : 3);
        tkv_destroy(kv);
        CHECK_EQ(memory.held, 0);
    }
    CHECK(i > 2 && i < 100);
    for (st = TKV_ERR_NOMEM, i = 1; st && i < 100; i++) {
        kv = create_cache(&cfg);
        CHECK_EQ(append_to_all_layers(kv, 0, 1, 1100, 100), TKV_OK);
        CHECK_EQ(tkv_seq_publish_prefix(kv, &p, NULL, &info), TKV_OK);
        p.seq = 1;
        memory.fail_at = i;
        st = tkv_seq_adopt_prefix(kv, &p, NULL, &info);
        memory.fail_at = 0;
        CHECK(st == TKV_OK || st == TKV_ERR_NOMEM);
        check_cache_at(kv, "a failed adoption", i);
        CHECK_EQ(tkv_get_length(kv, 1, TKV_ALL_LAYERS), info.n_tokens);
        CHECK_EQ(tkv_seq_reset(kv, 1), TKV_OK);
        p.seq = 0;
        tkv_destroy(kv);
        CHECK_EQ(memory.held, 0);
    }
    CHECK(i > 2 && i < 100);
    memset(&cfg.host.allocator, 0, sizeof cfg.host.allocator); /* within a budget */
    memset(levels, 0, sizeof levels);
    levels[0].warm = levels[0].archive = pair_of(TKV_KIVI4, TKV_KIVI4);
    levels[1].warm = levels[1].archive = pair_of(TKV_KIVI2, TKV_KIVI2);
    cfg.budget.ladder = levels;
    cfg.budget.n_levels = 1;
    cfg.budget.bytes = 400000;
    kv = create_cache(&cfg); /* one level: a cache that is full has nothing to code or to give */
    while (append_to_all_layers(kv, 0, 1, 20, 20) == TKV_OK && tkv_get_length(kv, 0, 0) < TEXT - 20) continue;
    n_tokens = tkv_get_length(kv, 0, TKV_ALL_LAYERS);
    CHECK_EQ(publish_pages(kv, n_tokens, TKV_ERR_BUDGET), 0);
    CHECK(strstr(tkv_get_last_error(kv), "bytes"));
    check_cache(kv);
    CHECK_EQ(tkv_set_budget(kv, (size_t)1 << 24), TKV_OK);
    CHECK_EQ(publish_pages(kv, 400, TKV_OK), 1);
    CHECK_EQ(publish_pages(kv, 1100, TKV_OK), 4); /* the first name goes on in a longer list */
    CHECK_EQ(found_here(kv, 1, p.tokens, 1100), 4);
    tkv_destroy(kv);
    cfg.budget.n_levels = 2;
    for (i = 0; i < 40; i++) {
        cfg.budget.bytes = (size_t)1 << 24;
        kv = create_cache(&cfg);
        CHECK_EQ(append_to_all_layers(kv, 0, 1, 1100, 20), TKV_OK);
        CHECK_EQ(tkv_seq_flush(kv, 0, TKV_FLUSH_FULL), TKV_OK);
        CHECK_EQ(tkv_get_memory(kv, &m), TKV_OK);
        if (tkv_set_budget(kv, m.total + 20000 - (size_t)(2048 * i)) == TKV_OK) {
            st = tkv_seq_publish_prefix(kv, &p, NULL, &info);
            CHECK_MSG(st == TKV_ERR_BUDGET || st == TKV_OK, "%d: %s", st, tkv_get_last_error(kv));
            n_short += st == TKV_ERR_BUDGET || info.n_pages < 3; /* room can come from the pages */
            check_cache(kv);                                     /* no more than the budget */
            n_found = found_here(kv, 1, p.tokens, 1100); /* what this takes can come from the pages, too */
            CHECK(n_found <= (st ? 0 : info.n_pages));
            n_whole += n_found == 4;
        }
        tkv_destroy(kv);
    }
    CHECK_MSG(n_short > 0 && n_whole > 0, "%d and %d", n_short, n_whole);
    memset(&cfg.budget, 0, sizeof cfg.budget); /* in place */
    cfg.limits.max_tokens = 1200;
    cfg.limits.max_seqs = 3;
    CHECK_EQ(tkv_get_required_bytes(&cfg, &bytes, NULL), TKV_OK);
    arena = malloc(bytes);
    CHECK_EQ(tkv_create_in_place(&cfg, arena, bytes, &kv, NULL, 0), TKV_OK);
    CHECK_EQ(append_to_all_layers(kv, 0, 1, 1100, 100), TKV_OK);
    CHECK_EQ(tkv_seq_publish_prefix(kv, &p, NULL, &info), TKV_ERR_CAPACITY);
    CHECK(strstr(tkv_get_last_error(kv), "in place"));
    tkv_destroy(kv);
    free(arena);
}

/* In place, scratch memory is the caller's. */
/* Blocks that a budget codes again leave the path of the plan. Names of their pages stay, but nothing is found there, and
 * another sequence with fewer pages is preferred. */
TEST(recoded_pages_are_not_found) {
    tkv_config cfg = config_of(0);
    tkv_level levels[2];
    int i, n_pages, n_found, n_second, n_recoded = 0;
    memset(levels, 0, sizeof levels);
    levels[0].warm = levels[0].archive = pair_of(TKV_KIVI4, TKV_KIVI4);
    levels[1].warm = levels[1].archive = pair_of(TKV_KIVI2, TKV_KIVI2);
    cfg.budget.bytes = (size_t)1 << 24;
    cfg.budget.ladder = levels;
    cfg.budget.n_levels = 2;
    for (i = 0; i < 24; i += 4) {
        tkv_cache *kv = create_cache(&cfg);
        tkv_memory_info m;
        CHECK_EQ(append_to_all_layers(kv, 0, 1, 1100, 20), TKV_OK);
        CHECK_EQ(tkv_seq_flush(kv, 0, TKV_FLUSH_FULL), TKV_OK);
        publish_here(kv, 0, tokens, 1100, &n_pages);
        CHECK_EQ(n_pages, 4);
        CHECK_EQ(tkv_get_memory(kv, &m), TKV_OK);
        CHECK_EQ(tkv_set_budget(kv, m.total - (size_t)(i * 2048)), TKV_OK);
        CHECK_EQ(tkv_set_budget(kv, (size_t)1 << 24), TKV_OK); /* adoption itself has room */
        n_found = found_here(kv, 1, tokens, 1100);
        CHECK(n_found == 0 || n_found == 4);
        n_recoded += !n_found;
        CHECK_EQ(tkv_seq_reset(kv, 1), TKV_OK);
        CHECK_EQ(append_to_all_layers(kv, 1, 1, 900, 20), TKV_OK);
        CHECK_EQ(tkv_seq_flush(kv, 1, TKV_FLUSH_FULL), TKV_OK);
        publish_here(kv, 1, tokens, 900, &n_second);
        CHECK_EQ(n_second, 3);
        CHECK_EQ(found_here(kv, 2, tokens, 1100), n_found ? 4 : 3);
        tkv_destroy(kv);
    }
    CHECK(n_recoded > 0 && n_recoded < 6);
}

TEST(stores_in_place) {
    static store s;
    const tkv_prefix_store callbacks = store_of(&s);
    tkv_prefix_params p = params_of(0, 1100);
    tkv_config cfg = config_of(0);
    tkv_prefix_info info;
    tkv_cache *kv, *heap;
    void *arena, *scratch = malloc(1 << 20);
    size_t bytes = 0, n, least[2] = {0, 0};
    int adopts, i;
    heap = create_cache(&cfg);
    cfg.limits.max_tokens = 1200;
    CHECK_EQ(tkv_get_required_bytes(&cfg, &bytes, NULL), TKV_OK);
    arena = malloc(bytes);
    CHECK_EQ(tkv_create_in_place(&cfg, arena, bytes, &kv, NULL, 0), TKV_OK);
    CHECK_EQ(append_to_all_layers(kv, 0, 1, 1100, 100), TKV_OK);
    CHECK_EQ(append_to_all_layers(heap, 0, 1, 1100, 100), TKV_OK);
    CHECK_EQ(tkv_seq_publish_prefix(kv, &p, &callbacks, &info), TKV_ERR_CAPACITY);
    CHECK(strstr(tkv_get_last_error(kv), "scratch"));
    p.scratch = (unsigned char *)scratch + 1; /* of any alignment */
    for (n = 1, i = 0; i < 9; i++) {          /* who gives what the sentence asks for gets there */
        const char *colon;
        p.scratch_bytes = n;
        if (tkv_seq_publish_prefix(kv, &p, &callbacks, &info) == TKV_OK) break;
        colon = strchr(tkv_get_last_error(kv), ':');
        CHECK(colon && strtoul(colon + 1, NULL, 10) > n);
        n = colon ? strtoul(colon + 1, NULL, 10) : n;
    }
    CHECK_MSG(i < 9 && info.n_pages == 3, "%d, %s", i, tkv_get_last_error(kv));
    empty_store(&s);
    for (adopts = 0; adopts < 2; adopts++) {
        tkv_status st = TKV_ERR_CAPACITY;
        for (n = 0; st && n < (1 << 20) - 1; n += 1024) {
            p.scratch_bytes = n;
            if (adopts) st = tkv_seq_adopt_prefix(kv, &p, &callbacks, &info);
            else st = tkv_seq_publish_prefix(kv, &p, &callbacks, &info);
            CHECK(st == TKV_OK || st == TKV_ERR_CAPACITY);
            check_cache(kv);
            if (st && adopts) CHECK_EQ(tkv_seq_reset(kv, 0), TKV_OK);
        }
        CHECK_EQ(st, TKV_OK);
        CHECK_EQ(info.n_pages, 3);
        least[adopts] = n;
        if (!adopts) CHECK_EQ(tkv_seq_reset(kv, 0), TKV_OK);
    }
    CHECK(least[0] > 1024 && least[1] > 1024 && least[0] < 400000);
    CHECK_EQ(tkv_seq_fork(heap, 0, 1, info.n_tokens), TKV_OK);
    compare_sequences(kv, 0, heap, 1);
    tkv_destroy(kv);
    tkv_destroy(heap);
    empty_store(&s);
    free(arena);
    free(scratch);
}

/* >>failures */
TEST(each_allocation_fails_once) {
    tkv_config cfg = config_of(0);
    counting_allocator memory;
    tkv_prefix_params p = params_of(0, 1100);
    tkv_prefix_info info;
    static store s;
    const tkv_prefix_store callbacks = store_of(&s);
    tkv_status st = TKV_ERR_NOMEM;
    int i;
    memset(&memory, 0, sizeof memory);
    cfg.host.allocator = counting_allocator_of(&memory);
    cfg.limits.max_states = 4;
    cfg.limits.state_bytes = 1 << 16;
    for (i = 1; st && i < 300; i++) {
        tkv_cache *a = create_cache(&cfg);
        snapshot before;
        CHECK_EQ(append_to_all_layers(a, 0, 1, 1100, 100), TKV_OK);
        CHECK_EQ(tkv_seq_put_state(a, 0, 1, SINKS + 768, "state", 6), TKV_OK);
        before = snapshot_of(a);
        memory.fail_at = i;
        st = tkv_seq_publish_prefix(a, &p, &callbacks, NULL);
        memory.fail_at = 0;
        CHECK(st == TKV_OK || st == TKV_ERR_NOMEM);
        CHECK(!st || tkv_get_last_error(a)[0]);
        check_unchanged(a, &before, "a failed publication");
        if (st) empty_store(&s);
        tkv_destroy(a);
        CHECK_EQ(memory.held, 0);
    }
    CHECK(i > 4 && i < 300);
    for (st = TKV_ERR_NOMEM, i = 1; st && i < 300; i++) {
        tkv_cache *b = create_cache(&cfg);
        CHECK_EQ(append_to_all_layers(b, 1, 2, 100, 100), TKV_OK);
        memory.fail_at = i;
        st = tkv_seq_adopt_prefix(b, &p, &callbacks, &info);
        memory.fail_at = 0;
        CHECK(st == TKV_OK || st == TKV_ERR_NOMEM);
        CHECK(!st || tkv_get_last_error(b)[0]);
        check_cache_at(b, "a failed adoption", i);
        CHECK_EQ(tkv_get_length(b, 0, TKV_ALL_LAYERS), st && !info.n_pages ? 0 : info.n_tokens);
        CHECK_EQ(tkv_get_length(b, p.spare, TKV_ALL_LAYERS), 0);
        check_read(b, 1, 0, 2, 0, 100, TKV_F16);
        tkv_destroy(b);
        CHECK_EQ(memory.held, 0);
    }
    CHECK(i > 4 && i < 300);
    CHECK_EQ(info.n_pages, 3);
    empty_store(&s);
}

TEST(refused) {
    tkv_config cfg = config_of(1);
    tkv_cache *kv = create_cache(&cfg);
    tkv_prefix_params p = params_of(0, 700), q;
    tkv_prefix_info info;
    static store s;
    tkv_prefix_store callbacks = store_of(&s), none;
    tkv_prefix_extra extra;
    tkv_prefix_hash h;
    counting_allocator memory;
    memset(&none, 0, sizeof none);
    CHECK_EQ(tkv_seq_publish_prefix(NULL, &p, &callbacks, &info), TKV_ERR_ARG);
    CHECK_EQ(tkv_get_prefix_hash(NULL, &p, 0, &h), TKV_ERR_ARG);
    CHECK_EQ(tkv_get_prefix_hash(kv, NULL, 0, &h), TKV_ERR_ARG);
    CHECK_EQ(tkv_get_prefix_hash(kv, &p, 0, NULL), TKV_ERR_ARG);
    CHECK_EQ(tkv_get_prefix_hash(kv, &p, 0, &h), TKV_ERR_STATE); /* it has no tables */
    CHECK(strstr(tkv_get_last_error(kv), "tables still change in layer 0"));
    CHECK_EQ(append_to_all_layers(kv, 0, 1, 700, 100), TKV_OK);
    CHECK_EQ(tkv_seq_publish_prefix(kv, &p, &callbacks, &info), TKV_ERR_STATE);
    CHECK(strstr(tkv_get_last_error(kv), "tables still change in layer 0"));
    CHECK_EQ(tkv_freeze_calibration(kv), TKV_OK);
    CHECK_EQ(tkv_seq_publish_prefix(kv, &p, &callbacks, &info), TKV_OK);
    CHECK_EQ(info.n_pages, 0); /* coded with earlier tables */
    CHECK_EQ(tkv_seq_reset(kv, 0), TKV_OK);
    CHECK_EQ(append_to_all_layers(kv, 0, 1, 700, 100), TKV_OK);
    CHECK_EQ(tkv_seq_publish_prefix(kv, &p, &callbacks, &info), TKV_OK);
    CHECK_EQ(info.n_pages, 1);
    CHECK_EQ(tkv_seq_publish_prefix(kv, &p, &none, &info), TKV_ERR_ARG);
    CHECK_EQ(tkv_seq_publish_prefix(kv, NULL, &callbacks, &info), TKV_ERR_ARG);
    CHECK_EQ(tkv_seq_adopt_prefix(kv, &p, &callbacks, &info), TKV_ERR_STATE); /* it has tokens */
    q = p;
    q.seq = 1;
    q.spare = 0; /* it has tokens */
    CHECK_EQ(tkv_seq_publish_prefix(kv, &q, &callbacks, &info), TKV_ERR_STATE);
    q.seq = q.spare = 1;
    CHECK_EQ(tkv_seq_adopt_prefix(kv, &q, &callbacks, &info), TKV_ERR_ARG);
    q = p;
    q.seq = SEQS;
    CHECK_EQ(tkv_seq_adopt_prefix(kv, &q, &callbacks, &info), TKV_ERR_ARG);
    q = p;
    q.tokens = NULL;
    CHECK_EQ(tkv_get_prefix_hash(kv, &q, 0, &h), TKV_ERR_ARG);
    q = p;
    q.model = NULL;
    CHECK_EQ(tkv_get_prefix_hash(kv, &q, 0, &h), TKV_ERR_ARG);
    q = p;
    q.salt_bytes = 6;
    CHECK_EQ(tkv_get_prefix_hash(kv, &q, 0, &h), TKV_ERR_ARG);
    q = p;
    q.n_extras = 1;
    CHECK_EQ(tkv_get_prefix_hash(kv, &q, 0, &h), TKV_ERR_ARG);
    q = p;
    memset(&extra, 0, sizeof extra);
    q.extras = &extra;
    q.n_extras = 1;
    CHECK_EQ(tkv_get_prefix_hash(kv, &q, 0, &h), TKV_OK);
    extra.size = 3;
    CHECK_EQ(tkv_get_prefix_hash(kv, &q, 0, &h), TKV_ERR_ARG);
    extra.bytes = "cat";
    extra.index = -1;
    CHECK_EQ(tkv_get_prefix_hash(kv, &q, 0, &h), TKV_ERR_ARG);
    extra.index = 700;
    CHECK_EQ(tkv_get_prefix_hash(kv, &q, 0, &h), TKV_ERR_ARG);
    CHECK_EQ(tkv_get_prefix_hash(kv, &p, 3, &h), TKV_ERR_ARG); /* 700 tokens have two pages */
    CHECK_EQ(tkv_get_prefix_hash(kv, &p, -1, &h), TKV_ERR_ARG);
    CHECK_EQ(tkv_get_prefix_hash(kv, &p, 2, &h), TKV_OK);
    CHECK_EQ(tkv_seq_begin(kv, 0), TKV_OK);
    CHECK_EQ(tkv_seq_publish_prefix(kv, &p, &callbacks, &info), TKV_ERR_STATE);
    CHECK_EQ(tkv_seq_abort(kv, 0), TKV_OK);
    {
        tkv_layer_config layers[LAYERS];
        tkv_config uneven = config_of(0);
        tkv_cache *other;
        memset(layers, 0, sizeof layers);
        layers[1].sink_tokens = 8;
        uneven.layers = layers;
        other = create_cache(&uneven);
        CHECK_EQ(append_to_all_layers(other, 0, 1, 700, 100), TKV_OK);
        CHECK_EQ(tkv_seq_publish_prefix(other, &p, &callbacks, &info), TKV_ERR_UNSUPPORTED);
        CHECK_STR(tkv_get_last_error(other), "pages need as many sinks as in layer 0: layer 1");
        tkv_destroy(other);
    }
    cfg.host.allocator = counting_allocator_of(&memory); /* the bytes of a table need memory */
    {
        tkv_cache *other = create_with_tables(&cfg);
        memory.fail_at = 1;
        CHECK_EQ(tkv_get_prefix_hash(other, &p, 0, &h), TKV_ERR_NOMEM);
        memory.fail_at = 0;
        CHECK_EQ(tkv_get_prefix_hash(other, &p, 0, &h), TKV_OK);
        tkv_destroy(other);
    }
    cfg.host.allocator.alloc = NULL;
    cfg.host.allocator.release = NULL;
    cfg.tiers.warm_tokens = TKV_OFF; /* blocks of the archive alone, of an earlier table */
    {
        tkv_cache *other = create_cache(&cfg);
        CHECK_EQ(append_to_all_layers(other, 0, 1, 700, 100), TKV_OK);
        CHECK_EQ(tkv_freeze_calibration(other), TKV_OK);
        CHECK_EQ(tkv_seq_publish_prefix(other, &p, &callbacks, &info), TKV_OK);
        CHECK_EQ(info.n_pages, 0);
        tkv_destroy(other);
    }
    s.fails = 1; /* a store that takes nothing */
    p.salt = "other";
    p.salt_bytes = 5;
    CHECK_EQ(tkv_seq_publish_prefix(kv, &p, &callbacks, &info), TKV_OK);
    CHECK(info.n_put == 0 && info.n_rejected == info.n_pages && info.n_pages > 0);
    check_cache(kv);
    tkv_destroy(kv);
    empty_store(&s);
    cfg = config_of(0);
    cfg.tiers.archive.k = TKV_SQUAT2;
    kv = create_cache(&cfg);
    CHECK_EQ(tkv_get_prefix_hash(kv, &p, 0, &h), TKV_ERR_UNSUPPORTED);
    tkv_destroy(kv);
    cfg = config_of(0);
    cfg.model.window = 300;
    kv = create_cache(&cfg);
    CHECK_EQ(tkv_get_prefix_hash(kv, &p, 0, &h), TKV_ERR_UNSUPPORTED);
    CHECK(strstr(tkv_get_last_error(kv), "window"));
    tkv_destroy(kv);
    cfg = config_of(0);
    cfg.tiers.n_anchors = 8;
    kv = create_cache(&cfg);
    CHECK_EQ(tkv_get_prefix_hash(kv, &p, 0, &h), TKV_ERR_UNSUPPORTED);
    tkv_destroy(kv);
}

int main(int argc, char **argv) {
    int i;
    tkv_test_begin(argc, argv);
    for (i = 0; i < TEXT; i++) tokens[i] = i * 7919 % 50000 - 5;
    RUN(same_bits_without_tables);
    RUN(same_bits_with_tables);
    RUN(hashes_name_all_that_decides_bytes);
    RUN(extras_do_not_run_together);
    RUN(golden_hash);
    RUN(wrong_values_end_the_prefix);
    RUN(forged_values_are_refused);
    RUN(forged_lists_are_refused);
    RUN(a_wrong_value_ends_the_questions);
    RUN(layers_that_share_are_adopted);
    RUN(pages_of_other_ages_join);
    RUN(a_prefix_ends_where_states_are);
    RUN(no_prefix_without_its_states);
    RUN(states_of_a_page_go_for_those_of_the_next);
    RUN(only_the_path_is_published);
    RUN(blocks_of_another_level);
    RUN(caches_with_a_ladder);
    RUN(a_budget_spoils_no_page);
    RUN(sequences_find_each_other);
    RUN(names_go_with_their_tokens);
    RUN(the_longest_prefix_is_found);
    RUN(forgotten_names_are_wiped);
    RUN(random_prefixes);
    RUN(names_have_no_memory);
    RUN(recoded_pages_are_not_found);
    RUN(stores_in_place);
    RUN(each_allocation_fails_once);
    RUN(refused);
    return tkv_test_end();
}
