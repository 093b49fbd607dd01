/*
 * test_save_removed.c - a save holds nothing of tokens that it does not say: removed, cut off, evicted, replaced or later
 * ones, those of other sequences.
 *
 * Two caches get the same tokens, but for those that go: their keys and values differ. When they have gone, both save the
 * same bytes. Where a block was coded before, scales and means of its channels know of all its tokens. There the second
 * cache has the same rows in another order, which leaves these as they are.
 */
#include "saved_files.h"

enum { L = 2, H = 2, D = 16, DV = 12, N = 300, MOST = 4 << 20, SINKS = 4, SEQS = 4 };

static unsigned char saved[2][MOST + 64], journal[2][MOST];
static int n_saves, n_refused;

/* >>tokens: rows [head][channel], small whole numbers, so that sums are exact in any order */
/* A token in each block is an outlier, which formats A have in a row of its own. */
static float value_of(int token, int i) {
    const float x = (float)((token * 37 + i * 101 + token * i * 7) % 61 - 30);
    return token % 64 == 8 ? 40.0f * x : x;
}

typedef struct script {
    tkv_cache *kv;
    uint64_t goes[N / 64 + 1]; /* bit per token: it goes */
    int is_other;              /* 1: those that go have other values */
    int permutes;              /* 1: as the other values, they take those of another token that goes */
    int is_refused;            /* 1: the config has no such call */
} script;

static int goes(const script *s, int token) { return token < N && s->goes[token / 64] >> token % 64 & 1; }

/* The token whose values a token gets. Those that go in a group of 32 are taken in reverse. */
static int source_of(const script *s, int token) {
    int first = (token - SINKS) / 32 * 32 + SINKS, last = first + 31;
    if (!s->is_other || !goes(s, token) || (s->permutes && token < SINKS)) return token;
    if (!s->permutes) return token + 1000;
    for (; first <= last; first++, last--) {
        while (first < last && !goes(s, first)) first++;
        while (first < last && (last >= N || !goes(s, last))) last--;
        if (first == token) return last;
        if (last == token) return first;
    }
    return token;
}

static void mark(script *s, int from, int end) {
    for (; from < end; from++) s->goes[from / 64] |= (uint64_t)1 << from % 64;
}

static void append(const script *s, int seq, int from, int n) {
    static float k[64 * H * D], v[64 * H * DV];
    for (int at = from; at < from + n; at++) {
        for (int layer = 0; layer < L; layer++) {
            for (int i = 0; i < H * D; i++) k[i] = value_of(source_of(s, at) + 7 * layer, i);
            for (int i = 0; i < H * DV; i++) v[i] = value_of(source_of(s, at) + 7 * layer, 50 + i);
            CHECK_EQ(tkv_append(s->kv, seq, layer, k, v, 1), TKV_OK);
        }
    }
}

/* >>holes: each marks the tokens that will go, appends tokens to sequence 0, and takes those away */
/* When tokens go. LATE: after the first tables were learned; CODED: after their blocks were coded, if the config codes any */
typedef enum age { EARLY, LATE, CODED } age;

typedef struct hole {
    const char *name;
    void (*make)(script *s);
    int length; /* of the save */
    int seq;    /* that is saved */
    age when;
} hole;

static void check(script *s, tkv_status st) {
    if (st == TKV_ERR_ARG || st == TKV_ERR_UNSUPPORTED || st == TKV_ERR_CONFIG || st == TKV_ERR_STATE)
        s->is_refused = 1;
    else CHECK_EQ(st, TKV_OK);
}

static void remove_marked(script *s, int from, int end) { check(s, tkv_seq_remove(s->kv, 0, from, end)); }

static void hole_middle(script *s) {
    mark(s, 20, 30);
    append(s, 0, 0, 60);
    remove_marked(s, 20, 30);
    append(s, 0, 60, N - 60);
}
static void hole_start(script *s) {
    mark(s, 0, 9);
    append(s, 0, 0, 60);
    remove_marked(s, 0, 9);
    append(s, 0, 60, N - 60);
}
static void hole_end(script *s) {
    mark(s, 50, 68); /* over the border of a block */
    append(s, 0, 0, 80);
    remove_marked(s, 50, 68);
    append(s, 0, 80, N - 80);
}
static void hole_whole_block(script *s) {
    mark(s, 68, 140);
    append(s, 0, 0, 150);
    remove_marked(s, 68, 140);
    append(s, 0, 150, N - 150);
}
static void hole_last(script *s) {
    mark(s, 290, N);
    append(s, 0, 0, N);
    remove_marked(s, 290, N);
}
static void hole_cut(script *s) {
    mark(s, 281, N);
    append(s, 0, 0, N);
    CHECK_EQ(tkv_seq_truncate(s->kv, 0, 281), TKV_OK);
}
static void hole_replaced(script *s) {
    mark(s, 270, 290);
    append(s, 0, 0, 290);
    CHECK_EQ(tkv_seq_truncate(s->kv, 0, 270), TKV_OK);
    append(s, 0, 291, 5); /* in the place of the first of them */
}
static void hole_later(script *s) {
    mark(s, 10, N);
    append(s, 0, 0, N);
}
static void hole_later_behind_a_gap(script *s) {
    mark(s, 10, N);
    append(s, 0, 0, N);
    remove_marked(s, 68, 132);
}
static void hole_evicted(script *s) {
    script victims;
    memset(&victims, 0, sizeof victims);
    for (int i = 5; i < 200; i++)
        if (i % 4 == 1 || i % 4 == 2) mark(s, i, i + 1), mark(&victims, i, i + 1);
    append(s, 0, 0, N);
    check(s, evict_tokens(s->kv, 0, TKV_ALL_LAYERS, victims.goes, N));
}
static void hole_evicted_and_later(script *s) {
    mark(s, 150, N);
    hole_evicted(s);
}
static void hole_split(script *s) {
    mark(s, 66, 72);
    mark(s, 80, 90);
    append(s, 0, 0, 100);
    check(s, tkv_seq_shift(s->kv, 0, 75, TKV_UNLIMITED, 3));
    remove_marked(s, 66, 72);
    remove_marked(s, 83, 93); /* their positions now */
    append(s, 0, 100, N - 100);
}
static void hole_split_and_cut(script *s) {
    mark(s, 278, N);
    append(s, 0, 0, N);
    check(s, tkv_seq_shift(s->kv, 0, 265, TKV_UNLIMITED, 3));
    CHECK_EQ(tkv_seq_truncate(s->kv, 0, 278), TKV_OK);
}
static void hole_kept(script *s) {
    int kept[20];
    for (int i = 0; i < 20; i++) kept[i] = 260 + 2 * i;
    mark(s, 250, N);
    for (int i = 0; i < 20; i++) s->goes[kept[i] / 64] &= ~((uint64_t)1 << kept[i] % 64);
    append(s, 0, 0, N);
    check(s, tkv_seq_keep(s->kv, 0, 250, kept, 20));
}
static void hole_slid(script *s) {
    int n_removed = 0;
    mark(s, 4, 132);
    append(s, 0, 0, N);
    check(s, tkv_seq_slide(s->kv, 0, 128, &n_removed));
    if (!s->is_refused) CHECK_EQ(n_removed, 128);
}
static void hole_moved(script *s) { /* the copy of a row has tokens in blocks of another sequence */
    mark(s, 100, 130);
    mark(s, 150, N);
    append(s, 0, 0, N);
    check(s, tkv_seq_copy(s->kv, 0, 0, 100, 1, 0));
    check(s, tkv_seq_copy(s->kv, 0, 130, 150, 1, 100));
}
static void hole_forked(script *s) {
    mark(s, 270, N);
    append(s, 0, 0, N);
    CHECK_EQ(tkv_seq_fork(s->kv, 0, 1, 270), TKV_OK);
}
static void hole_cut_in_all_forks(script *s) {
    mark(s, 270, N);
    append(s, 0, 0, N);
    CHECK_EQ(tkv_seq_fork(s->kv, 0, 1, N), TKV_OK);
    CHECK_EQ(tkv_seq_fork(s->kv, 0, 2, N), TKV_OK);
    for (int seq = 0; seq < 3; seq++) CHECK_EQ(tkv_seq_truncate(s->kv, seq, 270 - seq), TKV_OK);
}
static void hole_twice(script *s) { /* a list that has a block twice */
    mark(s, 30, 40);
    append(s, 0, 0, 60);
    CHECK_EQ(tkv_seq_fork(s->kv, 0, 1, 60), TKV_OK);
    remove_marked(s, 30, 40);
    check(s, tkv_seq_remove(s->kv, 1, 30, 40));
    append(s, 0, 60, 100);
    check(s, tkv_seq_copy(s->kv, 1, 0, 30, 0, tkv_get_length(s->kv, 0, TKV_ALL_LAYERS)));
}
static void hole_open_step(script *s) {
    mark(s, 290, N);
    append(s, 0, 0, 290);
    CHECK_EQ(tkv_seq_begin(s->kv, 0), TKV_OK);
    append(s, 0, 290, N - 290);
    CHECK_EQ(tkv_seq_abort(s->kv, 0), TKV_OK);
}

static const hole holes[] = {{"middle", hole_middle, 0, 0, EARLY},
                             {"start", hole_start, 0, 0, EARLY},
                             {"end of a block", hole_end, 0, 0, EARLY},
                             {"a whole block", hole_whole_block, 0, 0, EARLY},
                             {"the last ones", hole_last, 0, 0, LATE},
                             {"cut", hole_cut, 0, 0, LATE},
                             {"replaced", hole_replaced, 0, 0, LATE},
                             {"later", hole_later, 10, 0, CODED},
                             {"later, behind a gap", hole_later_behind_a_gap, 10, 0, CODED},
                             {"evicted", hole_evicted, 0, 0, CODED},
                             {"evicted, and later ones", hole_evicted_and_later, 150, 0, CODED},
                             {"split", hole_split, 0, 0, EARLY},
                             {"split and cut", hole_split_and_cut, 0, 0, LATE},
                             {"kept", hole_kept, 0, 0, LATE},
                             {"slid", hole_slid, 0, 0, CODED},
                             {"moved to another sequence", hole_moved, 0, 1, CODED},
                             {"of another sequence", hole_forked, 0, 1, LATE},
                             {"cut in all forks", hole_cut_in_all_forks, 0, 0, LATE},
                             {"in a block that is there twice", hole_twice, 0, 0, EARLY},
                             {"of an aborted step", hole_open_step, 0, 0, LATE}};

/* >>configs */
enum { CONFIGS = 20 };

/* *is_coded: 1 if old tokens are coded. *learns: 1 if tables are learned from tokens. */
static tkv_config config_number(int i, int *is_coded, int *learns) {
    static const tkv_format coded[][2] = {{TKV_A30, TKV_R20},
                                          {TKV_A15, TKV_R15},
                                          {TKV_KIVI4, TKV_KIVI2},
                                          {TKV_Q8, TKV_KIVI3},
                                          {TKV_INT8, TKV_INT4},
                                          {TKV_FP4, TKV_FP8_E5M2},
                                          {TKV_SUBSPACE4, TKV_SUBSPACE2},
                                          {TKV_SQUAT2, TKV_Q8},
                                          {TKV_KVQUANT3, TKV_KVQUANT2}};
    tkv_config cfg = make_sized_config(L, 2 * H, H, D, SEQS, 128);
    cfg.model.v_head_dim = DV;
    cfg.model.rope.dim = D;
    cfg.limits.max_tokens = N + 62;
    cfg.tiers.hot_tokens = TKV_UNLIMITED;
    *is_coded = i >= 4;
    *learns = i == 4 || i == 5 || i == 12 || i == 19;
    if (i == 0) cfg.tiers.hot = pair_of(TKV_F32, TKV_BF16);
    if (i == 1 || i == 3) cfg.evict.policy = TKV_EVICT_KNORM; /* scores are norms of keys */
    if (i == 2) cfg.model.v_in_k = 1;
    if (i == 3) cfg.tiers.n_anchors = 8, cfg.importance.sample_every = 4;
    if (i < 4) return cfg;
    cfg.tiers.hot_tokens = 64;
    cfg.tiers.warm_tokens = TKV_OFF;
    cfg.tiers.warm = cfg.tiers.archive = pair_of(coded[i < 13 ? i - 4 : 2][0], coded[i < 13 ? i - 4 : 2][1]);
    if (i == 6) cfg.format.group_size = 32;
    if (i == 8) cfg.format.center_k = 1;
    if (i == 13) cfg.evict.policy = TKV_EVICT_KNORM;
    if (i == 14) cfg.meter.heads = 2, cfg.meter.tokens = 512;
    if (i == 15) cfg.model.v_in_k = 1, cfg.tiers.warm = cfg.tiers.archive = pair_of(TKV_KIVI4, TKV_KIVI4);
    if (i == 16) cfg.evict.policy = TKV_EVICT_KNORM, cfg.format.group_size = 32;
    if (i == 17) cfg.tiers.warm = pair_of(TKV_Q8, TKV_Q8), cfg.tiers.warm_tokens = 64;
    if (i == 18) cfg.format.k_scales = TKV_SCALES_CHANNEL;
    if (i == 19) cfg.budget.bytes = 400000;
    return cfg;
}

static size_t save(tkv_cache *kv, int seq, int length, unsigned char *to, size_t former) {
    tkv_save_params p = save_params(seq);
    size_t n = 0;
    p.length = length;
    p.with_scores = 1;
    p.former = former ? to : NULL;
    p.former_bytes = former;
    CHECK_MSG(tkv_seq_save(kv, &p, to + former, MOST - former, &n) == TKV_OK, "%s", tkv_get_last_error(kv));
    n_saves++;
    return n;
}

/* 1 if both saves have the same bytes. */
static void check_same_bytes(const unsigned char *a, size_t n, const unsigned char *b, size_t m, int config,
                             const char *name, const char *what) {
    size_t at = 0;
    while (at < n && at < m && a[at] == b[at]) at++;
    CHECK_MSG(n == m && at == n, "config %d, %s: %s of %d bytes knows from byte %d on what has gone", config,
              name, what, (int)n, (int)at);
}

/* What a caller reads of a sequence, as a hash. */
static uint64_t hash_of_sequence(tkv_cache *kv, int seq) {
    float k[H * D], v[H * D], out[2 * H * D], q[2 * H * D];
    uint64_t h = HASH_START;
    for (int layer = 0; layer < L; layer++) {
        const int len = tkv_get_length(kv, seq, layer);
        for (int t = 0; t < len; t++) {
            int position = 0;
            memset(v, 0, sizeof v);
            if (tkv_read(kv, seq, layer, t, 1, k, v) != TKV_OK) continue;
            CHECK_EQ(tkv_get_positions(kv, seq, layer, t, 1, &position), TKV_OK);
            h = hash_of_floats(hash_of_floats(h, k, H * D), v, H * DV);
            h = h * 31 + (uint64_t)(unsigned)(position + 7 * t);
        }
        for (int i = 0; i < 2 * H * D; i++) q[i] = (float)(i * 5 % 7 - 3) / 9.0f;
        memset(out, 0, sizeof out);
        if (len) CHECK_EQ(tkv_attend(kv, seq, layer, q, 1, out), TKV_OK);
        h = hash_of_floats(h, out, 2 * H * D);
    }
    return h;
}

/* Loads a save, and compares what can be read of its sequences. */
static void check_loads(const tkv_config *cfg, tkv_cache *kv, int seq, int length, const unsigned char *bytes,
                        size_t n, int config, const char *name) {
    tkv_cache *loaded = create_cache(cfg);
    const tkv_load_params p = load_params(seq);
    const int first = seq == TKV_ALL_SEQS ? 0 : seq, end = seq == TKV_ALL_SEQS ? SEQS : seq + 1;
    CHECK_MSG(tkv_seq_load(loaded, &p, bytes, n, NULL) == TKV_OK, "config %d, %s: %s", config, name,
              tkv_get_last_error(loaded));
    check_cache(loaded);
    if (length) CHECK_EQ(tkv_seq_fork(kv, seq, SEQS - 1, length), TKV_OK);
    for (int i = first; i < end; i++)
        CHECK_MSG(hash_of_sequence(loaded, i) == hash_of_sequence(kv, length ? SEQS - 1 : i),
                  "config %d, %s: sequence %d differs", config, name, i);
    tkv_destroy(loaded);
}

static void check_hole(int config, const hole *h) {
    script s[2];
    size_t n[2], whole[2], former[2], grown[2];
    int is_coded, learns;
    const tkv_config cfg = config_number(config, &is_coded, &learns);
    if (h->when != EARLY && learns) return; /* a table knows sums and ranges of the tokens that it is from */
    memset(s, 0, sizeof s);
    for (int i = 0; i < 2; i++) {
        s[i].is_other = i;
        s[i].permutes = is_coded && h->when == CODED;
        s[i].kv = create_cache(&cfg);
        h->make(&s[i]);
        check_cache(s[i].kv);
    }
    if (s[0].is_refused) n_refused++;
    for (int i = 0; i < 2 && !s[0].is_refused; i++) n[i] = save(s[i].kv, h->seq, h->length, saved[i], 0);
    if (!s[0].is_refused) {
        check_same_bytes(saved[0], n[0], saved[1], n[1], config, h->name, "a save");
        for (int i = 0; i < 2; i++)
            check_loads(&cfg, s[i].kv, h->seq, h->length, saved[i], n[i], config, h->name);
    }
    if (!s[0].is_refused && !h->length && !h->seq) { /* else another sequence has the tokens */
        for (int i = 0; i < 2; i++) whole[i] = save(s[i].kv, TKV_ALL_SEQS, 0, saved[i], 0);
        check_same_bytes(saved[0], whole[0], saved[1], whole[1], config, h->name, "a whole save");
        for (int i = 0; i < 2; i++)
            check_loads(&cfg, s[i].kv, TKV_ALL_SEQS, 0, saved[i], whole[i], config, h->name);
    }
    for (int i = 0; i < 2 && !s[0].is_refused;
         i++) { /* a journal keeps what earlier saves wrote, and adds no more */
        former[i] = save(s[i].kv, h->seq, h->length, journal[i], 0);
        append(&s[i], h->seq, N + 10, 40);
        grown[i] = save(s[i].kv, h->seq, h->length, journal[i], former[i]);
    }
    if (!s[0].is_refused)
        check_same_bytes(journal[0], former[0] + grown[0], journal[1], former[1] + grown[1], config, h->name,
                         "a journal");
    for (int i = 0; i < 2; i++) tkv_destroy(s[i].kv);
}

TEST(nothing_of_removed_tokens_is_saved) {
    const int stride = tkv_test_stride(5, 2);
    for (int config = 0; config < CONFIGS; config++)
        for (int i = 0; i < COUNT(holes); i++)
            if ((config + i) % stride == 0) check_hole(config, &holes[i]);
    CHECK(n_saves > 2000 / stride);
    printf("   %d saves, %d holes refused", n_saves, n_refused);
}

/* Blocks in a store, or in attached bytes, are saved as those in RAM. */
TEST(nothing_of_removed_tokens_is_saved_from_outside_ram) {
    unsigned char *attached = saved[0] + (64 - (uintptr_t)saved[0] % 64) % 64;
    for (int is_attached = 0; is_attached < 2; is_attached++) {
        static unsigned char other[MOST];
        size_t n[2], bytes;
        for (int i = 0; i < 2; i++) {
            int is_coded, learns;
            tkv_config cfg = config_number(6, &is_coded, &learns);
            tkv_load_params load = load_params(0);
            tkv_load_info info;
            test_store store;
            script s;
            memset(&s, 0, sizeof s);
            if (!is_attached) attach_test_store(&store, &cfg);
            mark(&s, 80, 86);
            s.permutes = 1;
            s.is_other = i;
            s.kv = create_cache(&cfg);
            append(&s, 0, 0, N);
            load.attach = is_attached;
            if (is_attached) {
                bytes = save(s.kv, 0, 0, attached, 0);
                tkv_destroy(s.kv);
                s.kv = create_cache(&cfg);
                CHECK_EQ(tkv_seq_load(s.kv, &load, attached, bytes, &info), TKV_OK);
                CHECK(info.n_attached > 0);
            } else {
                CHECK_EQ(tkv_offload(s.kv, 0, TKV_ALL_LAYERS, 100, NULL), TKV_OK);
                CHECK(store.n_writes > 0);
            }
            CHECK_EQ(tkv_seq_remove(s.kv, 0, 80, 86), TKV_OK);
            n[i] = save(s.kv, 0, 0, i ? other : saved[1], 0);
            tkv_destroy(s.kv);
            if (!is_attached) destroy_test_store(&store);
        }
        check_same_bytes(saved[1], n[0], other, n[1], 6, "outside RAM", is_attached ? "attached" : "a store");
    }
}

/* >>prefixes */
typedef struct page {
    size_t n;
    int n_put;
    unsigned char *bytes;
} page;

static int put_page(void *user, const tkv_prefix_hash *hash, const void *bytes, size_t size) {
    page *to = (page *)user;
    (void)hash;
    to->n_put++;
    to->n = size;
    if (size > MOST) return 1;
    memcpy(to->bytes, bytes, size);
    return 0;
}

/* A page of a prefix is a save of its tokens. Those behind it, removed or not, change no byte. */
TEST(nothing_of_later_tokens_is_in_a_page) {
    static int tokens[N];
    page pages[2];
    int is_coded, learns;
    const tkv_config cfg = config_number(6, &is_coded, &learns);
    memset(pages, 0, sizeof pages);
    for (int i = 0; i < 2; i++) {
        tkv_prefix_params p;
        tkv_prefix_store store;
        script s;
        memset(&s, 0, sizeof s);
        memset(&p, 0, sizeof p);
        memset(&store, 0, sizeof store);
        mark(&s, SINKS + 256, N);
        s.is_other = i;
        s.kv = create_cache(&cfg);
        append(&s, 0, 0, N);
        CHECK_EQ(tkv_seq_fork(s.kv, 0, 1, TKV_UNLIMITED), TKV_OK);
        remove_marked(&s, SINKS + 256, SINKS + 270);
        CHECK_EQ(tkv_seq_flush(s.kv, 0, TKV_FLUSH_FULL) | tkv_seq_flush(s.kv, 1, TKV_FLUSH_FULL), TKV_OK);
        pages[i].bytes = saved[i];
        store.user = &pages[i];
        store.put = put_page;
        p.spare = SEQS - 1;
        p.tokens = tokens;
        p.n_tokens = SINKS + 256;
        p.model = model_name;
        p.model_bytes = sizeof model_name;
        CHECK_MSG(tkv_seq_publish_prefix(s.kv, &p, &store, NULL) == TKV_OK, "%s", tkv_get_last_error(s.kv));
        CHECK_EQ(pages[i].n_put, 1);
        tkv_destroy(s.kv);
    }
    check_same_bytes(saved[0], pages[0].n, saved[1], pages[1].n, 6, "behind a page", "a page");
}

/* Discards all that it can of sequence 0, and gives the rows back as they were appended, those of removed tokens too. */
static int restore_everything(tkv_cache *kv, const float *k, int n) {
    int start, m, n_discarded = 0, n_runs = 0;
    CHECK_EQ(tkv_seq_discard(kv, 0, n, &n_discarded), TKV_OK);
    while (n_runs++ < n && tkv_seq_find_discarded(kv, 0, &start, &m) == TKV_OK && m)
        CHECK_EQ(tkv_restore(kv, 0, 0, start, k + start * D, k + start * D, m), TKV_OK);
    return n_discarded;
}

/* A block that is restored is coded without the tokens that are gone by now. If they went before it was coded, it gets
 * the bytes that it had; if they went later, its scales know them no more. */
TEST(restored_blocks_hold_nothing_of_removed_tokens) {
    static const tkv_format keys[] = {TKV_KIVI4, TKV_KIVI2, TKV_Q8, TKV_A40, TKV_INT4, TKV_F16};
    static float k[2][600 * D];
    static unsigned char file[2][1 << 20], before[1 << 20];
    int f, late, which, i, t;
    for (which = 0; which < 2; which++)
        for (i = 0; i < 600 * D; i++) k[which][i] = (float)(i * 37 % 101 - 50) / 25;
    for (i = 70 * D; i < 80 * D; i++) k[1][i] = (float)(i % 7) * 35;
    for (f = 0; f < (int)(sizeof keys / sizeof *keys); f++)
        for (late = 0; late < 2; late++) {
            size_t size[2], size_before;
            for (which = 0; which < 2; which++) {
                tkv_config cfg = make_sized_config(1, 1, 1, D, 1, 64);
                const tkv_save_params p = save_params(0);
                tkv_cache *kv;
                cfg.tiers.warm = cfg.tiers.archive = pair_of(keys[f], TKV_KIVI4);
                kv = create_cache(&cfg);
                for (t = 0; t < 600; t += 40) {
                    CHECK_EQ(tkv_append(kv, 0, 0, k[which] + t * D, k[which] + t * D, 40), TKV_OK);
                    if (!late && t == 80) CHECK_EQ(tkv_seq_remove(kv, 0, 70, 80), TKV_OK);
                }
                if (late) CHECK_EQ(tkv_seq_remove(kv, 0, 70, 80), TKV_OK);
                CHECK_EQ(tkv_seq_save(kv, &p, before, sizeof before, &size_before), TKV_OK);
                CHECK(restore_everything(kv, k[which], 300) >= 128);
                CHECK_EQ(tkv_seq_save(kv, &p, file[which], sizeof *file, &size[which]), TKV_OK);
                if (!late) CHECK(size_before == size[which] && !memcmp(before, file[which], size_before));
                check_cache(kv);
                tkv_destroy(kv);
            }
            if (!late || keys[f] != TKV_A40) /* a table may have learned from them while they were there */
                CHECK_MSG(size[0] == size[1] && !memcmp(file[0], file[1], size[0]), "%s, %s",
                          tkv_get_name(TKV_NAME_FORMAT, keys[f]), late ? "removed late" : "removed before");
        }
}

/* The squares of large values are infinities. Tokens with such values are removed while they are exact, so what the
 * layer learns from attention, and with it the tables, knows nothing of them: in decoding, and in a prefill. */
TEST(tables_know_nothing_of_large_removed_values) {
    static float k[600 * 2 * D], v[600 * 2 * D], out[64 * 2 * D];
    static unsigned char file[2][1 << 20];
    int rows, which, i, t;
    for (rows = 1; rows <= 40; rows += 39) {
        size_t size[2];
        for (which = 0; which < 2; which++) {
            tkv_config cfg = make_sized_config(1, 2, 2, D, 1, 160);
            const tkv_save_params p = save_params(0);
            tkv_cache *kv;
            cfg.tiers.hot = pair_of(TKV_F32, TKV_F32);
            cfg.tiers.warm = cfg.tiers.archive = pair_of(TKV_A40, TKV_R40);
            cfg.tiers.hot_tokens = 300;
            for (i = 0; i < 600 * 2 * D; i++) k[i] = v[i] = (float)(i * 37 % 101 - 50) / 25;
            for (t = 70; t < 80; t++)
                for (i = 0; i < D; i++) v[t * 2 * D + i] = which ? 1e30f : 1.0f;
            kv = create_cache(&cfg);
            CHECK_EQ(tkv_append(kv, 0, 0, k, v, 160), TKV_OK);
            CHECK_EQ(tkv_seq_remove(kv, 0, 70, 80), TKV_OK);
            for (t = 160; t < 600; t += rows) {
                CHECK_EQ(tkv_append(kv, 0, 0, k + t * 2 * D, v + t * 2 * D, rows), TKV_OK);
                CHECK_EQ(tkv_attend(kv, 0, 0, k + t * 2 * D, rows, out), TKV_OK);
            }
            CHECK_EQ(tkv_seq_save(kv, &p, file[which], sizeof *file, &size[which]), TKV_OK);
            tkv_destroy(kv);
        }
        CHECK_MSG(size[0] == size[1] && !memcmp(file[0], file[1], size[0]), "%d rows", rows);
    }
}

int main(int argc, char **argv) {
    tkv_test_begin(argc, argv);
    RUN(nothing_of_removed_tokens_is_saved);
    RUN(nothing_of_removed_tokens_is_saved_from_outside_ram);
    RUN(nothing_of_later_tokens_is_in_a_page);
    RUN(restored_blocks_hold_nothing_of_removed_tokens);
    RUN(tables_know_nothing_of_large_removed_values);
    return tkv_test_end();
}
