/*
 * prefixes.c - a fuzz target: a store gives pages of a prompt whose bytes an input has changed, with right checksums,
 * and an empty sequence adopts them.
 *
 * At the start caches of each config read a text and publish its pages: formats with and without tables, states, RoPE,
 * V inside K, a budget. An input changes words of sections or bytes of blocks, cuts a value, exchanges two, or gives
 * that of another config. The store may claim any number of pages. The allocator may fail.
 *
 * After an adoption: the length is that of the pages adopted, the cache passes its self-check, other sequences attend
 * as before, and the spare sequence is empty. The sequence goes on: attention, appends, a save that is loaded again, a
 * publication whose pages another cache adopts, and calls that move, share and cut tokens, after which it is saved and
 * loaded once more. After the end no byte is held.
 *
 * Coverage-guided, with clang: make fuzz TARGET=prefixes
 * As a plain program, with any compiler, for random inputs or for files of inputs:
 *     cc -O2 -DTKV_FUZZ_MAIN -include assert.h -DTKV_ASSERT=assert tests/fuzz/prefixes.c examples/tieredkv.c \
 *         -o prefixes -lm
 *     ./prefixes --runs 100000 [--seed 1] [--bytes 30]
 */
#include "../saved_files.h"
#include "../sequences.h"
#include "saved_changes.h"

enum { LAYERS = 2, SEQS = 4, CONFIGS = 6, PAGES = 3, TEXT = 1000, VALUE = 1 << 16, RECORDS = 16, SINKS = 4 };

typedef struct value {
    tkv_prefix_hash hash;
    uint8_t bytes[VALUE];
    size_t n;
    size_t record[RECORDS],
        record_bytes[RECORDS]; /* places of records in the file, without their checksums */
    int n_records;
} value;

typedef struct page_store {
    value page[PAGES];
    int n, claims; /* claims: get returns this number; 0: the right one */
} page_store;

static page_store stores[CONFIGS], changed, republished;
static uint8_t calibration[CONFIGS][1 << 13];
static size_t n_calibration[CONFIGS];
static int tokens[TEXT];
static counting_allocator memory, twin_memory;
static long n_adopted, n_rejected;

/* >>stores */
static int get_pages(void *user, const tkv_prefix_hash *hashes, int n, const void **bytes, size_t *sizes) {
    page_store *s = (page_store *)user;
    int i, k;
    for (i = 0; i < n; i++) {
        for (k = 0; k < s->n && memcmp(&s->page[k].hash, &hashes[i], sizeof *hashes) != 0; k++) {}
        if (k == s->n) break;
        bytes[i] = s->page[k].bytes;
        sizes[i] = s->page[k].n;
    }
    return s->claims && i ? s->claims % 16 - 8 < i ? s->claims % 16 - 8 : n + 3 : i;
}

static int put_page(void *user, const tkv_prefix_hash *hash, const void *bytes, size_t size) {
    page_store *s = (page_store *)user;
    value *v = &s->page[s->n];
    if (s->n == PAGES || size > VALUE) return 1;
    s->n++;
    v->hash = *hash;
    v->n = size;
    memcpy(v->bytes, bytes, size);
    return 0;
}

static int has_page(void *user, const tkv_prefix_hash *hash) {
    const page_store *s = (const page_store *)user;
    int i;
    for (i = 0; i < s->n; i++)
        if (memcmp(&s->page[i].hash, hash, sizeof *hash) == 0) return 1;
    return 0;
}

static tkv_prefix_store callbacks_of(page_store *s) {
    tkv_prefix_store p;
    p.user = s;
    p.get = get_pages;
    p.put = put_page;
    p.has = has_page;
    return p;
}

/* >>caches */
static tkv_config config_of(int i) {
    static const tkv_level ladder[] = {{128, TKV_OFF, {TKV_KIVI4, TKV_KIVI4}, {TKV_KIVI4, TKV_KIVI4}, 0},
                                       {128, TKV_OFF, {TKV_KIVI2, TKV_KIVI2}, {TKV_KIVI2, TKV_KIVI2}, 0}};
    tkv_config c = make_config(LAYERS, SEQS);
    c.tiers.warm_tokens = 256;
    if (i == 1) c.tiers.warm = pair_of(TKV_A40, TKV_R40), c.tiers.archive = pair_of(TKV_A30, TKV_R30);
    if (i == 2) c.limits.max_states = 8, c.limits.state_bytes = 1 << 12;
    if (i == 3) c.model.rope.dim = DIM, c.tiers.archive = pair_of(TKV_KVQUANT3, TKV_KVQUANT2);
    if (i == 4) c.model.v_in_k = 1, c.tiers.warm = pair_of(TKV_Q8, TKV_Q8);
    if (i == 5) c.budget.bytes = 1 << 19, c.budget.ladder = ladder, c.budget.n_levels = COUNT(ladder);
    return c;
}

/* A cache whose tables are those of the first one of its config. */
static tkv_cache *create_for(int i, counting_allocator *held_by) {
    tkv_config cfg = config_of(i);
    tkv_cache *kv;
    cfg.host.allocator = counting_allocator_of(held_by);
    kv = create_cache(&cfg);
    if (i != 1 && i != 3) return kv;
    if (!n_calibration[i]) {
        CHECK_EQ(append_to_all_layers(kv, 0, 77, 300, 100), TKV_OK);
        CHECK_EQ(tkv_freeze_calibration(kv), TKV_OK);
        CHECK_EQ(tkv_save_calibration(kv, calibration[i], sizeof calibration[i], &n_calibration[i]), TKV_OK);
        CHECK_EQ(tkv_seq_reset(kv, 0), TKV_OK);
    }
    CHECK_EQ(tkv_load_calibration(kv, calibration[i], n_calibration[i]), TKV_OK);
    return kv;
}

static tkv_prefix_params params_of(int seq, int n) {
    tkv_prefix_params p;
    memset(&p, 0, sizeof p);
    p.seq = seq;
    p.spare = SEQS - 1;
    p.tokens = tokens;
    p.n_tokens = n;
    p.model = model_name;
    p.model_bytes = sizeof model_name;
    return p;
}

/* Finds the records of a value by their checksums. They begin at multiples of 64. */
static void find_records(value *v, uint32_t layer) {
    const uint8_t *e = find_in_index(v->bytes, v->n, SAVED_RECORDS, layer);
    size_t at = e ? (size_t)get64(e + 8) : 0, end = e ? at + (size_t)get64(e + 16) : 0, n;
    for (; at < end; at = (at + n + 8 + 63) / 64 * 64) {
        for (n = 8; at + n + 8 <= end && get64(v->bytes + at + n) != xxh64_of(v->bytes + at, n) + at;) n += 8;
        CHECK(at + n + 8 <= end && v->n_records < RECORDS);
        if (tkv_test_.n_bad) return;
        v->record[v->n_records] = at;
        v->record_bytes[v->n_records++] = n;
    }
}

static void make_stores(void) {
    int i, k, page;
    for (i = 0; i < TEXT; i++) tokens[i] = i * 7919 % 50000 - 5;
    for (i = 0; i < CONFIGS && !stores[i].n; i++) {
        const tkv_prefix_store callbacks = callbacks_of(&stores[i]);
        const tkv_prefix_params p = params_of(0, TEXT);
        tkv_cache *kv = create_for(i, &memory);
        CHECK_EQ(append_to_all_layers(kv, 0, i, TEXT, 20), TKV_OK);
        CHECK_EQ(tkv_seq_flush(kv, 0, TKV_FLUSH_FULL), TKV_OK);
        for (page = 0; page < 2 && i == 2; page++)
            for (k = 0; k < LAYERS; k++)
                CHECK_EQ(tkv_seq_put_state(kv, 0, k, SINKS + 256 * (page + 1), "a state", 8), TKV_OK);
        CHECK_MSG(tkv_seq_publish_prefix(kv, &p, &callbacks, NULL) == TKV_OK, "config %d: %s", i,
                  tkv_get_last_error(kv));
        CHECK_MSG(stores[i].n == PAGES, "config %d: %d pages", i, stores[i].n);
        for (k = 0; k < stores[i].n; k++)
            for (page = 0; page < LAYERS; page++) find_records(&stores[i].page[k], (uint32_t)page);
        tkv_destroy(kv);
    }
}

/* >>changes */
/* Copies the bytes that a value has, and not its whole room. */
static void copy_value(value *to, const value *from) {
    memcpy(to->bytes, from->bytes, from->n);
    to->hash = from->hash;
    to->n = from->n;
    memcpy(to->record, from->record, sizeof to->record);
    memcpy(to->record_bytes, from->record_bytes, sizeof to->record_bytes);
    to->n_records = from->n_records;
}

/* Changes bytes of a block, and repairs its checksum. */
static void change_record(value *v) {
    const int which = next_byte() % (v->n_records + !v->n_records), how = next_byte();
    const size_t at = v->n_records ? v->record[which] : 0, n = v->n_records ? v->record_bytes[which] : 0;
    int i;
    if (!n || at + n + 8 > v->n) return;
    if (how >= 250) memset(v->bytes + at, how % 2 ? 0xff : 0x7f, n);
    for (i = how % 8; i >= 0; i--) v->bytes[at + (size_t)next_below(1 << 14) % n] = (uint8_t)next_byte();
    put64(v->bytes + at + n, xxh64_of(v->bytes + at, n) + at);
}

static void change_value(value *v) {
    const int how = next_byte() % 32;
    if (how < 16) change_word(v->bytes, v->n);
    else if (how < 22) copy_words(v->bytes, v->n);
    else change_record(v);
}

/* Makes the store of an input. A change is in one of the first n_pages pages. */
static void change_store(int number, int n_pages) {
    const int how = next_byte(), other = next_byte() % CONFIGS;
    value *v = &changed.page[next_byte() % n_pages], *w = &changed.page[next_byte() % PAGES];
    tkv_prefix_hash hash;
    int i;
    for (i = 0; i < PAGES; i++) copy_value(&changed.page[i], &stores[number].page[i]);
    changed.n = stores[number].n;
    changed.claims = 0;
    hash = v->hash;
    if (how < 200) {
        for (i = 1 + next_byte() % 3; i > 0; i--) change_value(v);
        repair_index(v->bytes, v->n);
    } else if (how < 215) {
        v->n -= 1 + (size_t)next_below(1 << 14) % v->n;
    } else if (how < 230) {
        copy_value(v, &stores[other].page[next_byte() % PAGES]), v->hash = hash;
    } else if (how < 245) {
        *v = *w, v->hash = hash;
    } else {
        changed.claims = next_byte();
    }
}

/* >>an adoption, and what follows */
/* A hash of the outputs. may_fail 1: the query of a layer may see no token. */
static uint64_t try_attend(tkv_cache *kv, int seq, int may_fail) {
    float q[2 * K_ROW], out[2 * K_ROW];
    uint64_t h = HASH_START;
    tkv_status st;
    int layer, i;
    for (layer = 0; layer < LAYERS; layer++) {
        for (i = 0; i < COUNT(q); i++) q[i] = (float)((i * 37 + layer * 11) % 17 - 8) / 8.0f;
        memset(out, 0, sizeof out);
        st = tkv_attend(kv, seq, layer, q, 1, out);
        if (!may_fail) CHECK_EQ(st, TKV_OK);
        if (!st) h = hash_of_words(h, out, sizeof out);
    }
    return h;
}

static uint64_t attend(tkv_cache *kv, int seq) { return try_attend(kv, seq, 0); }

/* Publishes what was adopted. A twin adopts that, and attends alike. */
static void publish_again(tkv_cache *kv, int number, int n_pages, int n, uint64_t attended) {
    tkv_prefix_store callbacks = callbacks_of(&republished);
    tkv_prefix_params p = params_of(0, n);
    tkv_prefix_info info;
    tkv_cache *twin;
    republished.n = republished.claims = 0;
    CHECK_EQ(tkv_seq_publish_prefix(kv, &p, &callbacks, &info), TKV_OK);
    CHECK(info.n_pages <= n_pages);
    twin = create_for(number, &twin_memory);
    p.seq = 1;
    CHECK_EQ(tkv_seq_adopt_prefix(twin, &p, &callbacks, &info), TKV_OK);
    CHECK(info.n_pages <= republished.n);
    if (info.n_tokens == n) CHECK(attend(twin, 1) == attended);
    check_cache(twin);
    tkv_destroy(twin);
}

/* A call that moves, shares or cuts tokens of what was adopted. Sequence 1 is its partner. */
static void make_call(tkv_cache *kv) {
    const int what = next_byte() % 8, a = next_below(600), b = next_below(300),
              len = tkv_get_length(kv, 0, TKV_ALL_LAYERS);
    int indices[4], sources[2], i;
    for (i = 0; i < 4; i++) indices[i] = len - 8 + 2 * i + (a >> i & 1);
    sources[0] = a % 2;
    sources[1] = b % 2;
    if (what == 0) (void)tkv_seq_remove(kv, 0, a, a + b);
    if (what == 1 || what == 2) (void)tkv_seq_reset(kv, 1);
    if (what == 1 || what == 2) (void)tkv_seq_fork(kv, 0, 1, b % 3 ? 1 + a : TKV_UNLIMITED);
    if (what == 2) (void)tkv_seq_copy(kv, 1, b % 3 ? b : 0, TKV_UNLIMITED, 0, 0);
    if (what == 3) (void)tkv_seq_copy(kv, 1, a, a + b, 0, a);
    if (what == 4) (void)tkv_seq_keep(kv, 0, len > 8 ? len - 8 - b % 8 : 0, indices, 4);
    if (what == 5) (void)tkv_seq_reorder(kv, 0, sources, 2);
    if (what == 6) (void)tkv_seq_slide(kv, 0, 1 + b % 64, &i);
    if (what == 7) (void)tkv_seq_shift(kv, 0, a, TKV_UNLIMITED, 1 + b % 9);
    check_cache(kv);
}

static void go_on(tkv_cache *kv, int number, const tkv_prefix_info *info, int may_fail) {
    static uint8_t saved[1 << 18];
    tkv_save_params save = save_params(0);
    const tkv_load_params load = load_params(1);
    size_t n = 0;
    const uint64_t attended = attend(kv, 0);
    tkv_status st;
    int n_new;
    CHECK_EQ(info->n_tokens, SINKS + 256 * info->n_pages);
    if (next_byte() % 2) return;
    st = tkv_seq_save(kv, &save, saved, sizeof saved, &n);
    CHECK(st == TKV_OK || n > sizeof saved);
    if (!st) st = tkv_seq_load(kv, &load, saved, n, NULL);
    CHECK_MSG(st == TKV_OK || n > sizeof saved || (may_fail && st == TKV_ERR_BUDGET),
              "what was adopted and saved is refused: %s", tkv_get_last_error(kv));
    if (!st) CHECK(attend(kv, 1) == (may_fail ? attend(kv, 0) : attended));
    if (!may_fail) publish_again(kv, number, info->n_pages, info->n_tokens, attended);
    CHECK_EQ(tkv_seq_reset(kv, 1), TKV_OK);
    n_new = next_byte();
    st = append_to_all_layers(kv, 0, number, 1 + (n_new < 224 ? n_new % 48 : n_new), 100);
    CHECK(st == TKV_OK || (may_fail && st == TKV_ERR_BUDGET));
    check_cache(kv);
    if (n_new % 4 == 0) (void)attend(kv, 0);
    CHECK_EQ(tkv_seq_truncate(kv, 0, 1 + next_below(800) % info->n_tokens), TKV_OK);
    check_cache(kv);
    for (n_new = next_byte() % 6; n_new > 0; n_new--) make_call(kv);
    if (!tkv_get_length(kv, 0, 0) || !tkv_get_length(kv, 0, 1)) return;
    CHECK_EQ(tkv_seq_reset(kv, 1), TKV_OK);
    st = tkv_seq_save(kv, &save, saved, sizeof saved, &n);
    CHECK(st == TKV_OK || n > sizeof saved);
    if (!st) st = tkv_seq_load(kv, &load, saved, n, NULL);
    CHECK_MSG(st == TKV_OK || n > sizeof saved || (may_fail && st == TKV_ERR_BUDGET),
              "what was changed and saved is refused: %s", tkv_get_last_error(kv));
    if (!st && !may_fail) CHECK(try_attend(kv, 1, 1) == try_attend(kv, 0, 1));
    check_cache(kv);
}

static void run_input(void) {
    static const int most_pages[] = {1, 1, 1, 2, 1, PAGES, 2, 1}; /* attention over few takes less time */
    const int number = next_byte() % CONFIGS, way = next_byte(), n_pages = most_pages[way / 32];
    const tkv_prefix_store callbacks = callbacks_of(&changed);
    const tkv_prefix_params p = params_of(0, n_pages < PAGES ? SINKS + 256 * n_pages + 100 : TEXT);
    tkv_prefix_info info;
    tkv_cache *kv = create_for(number, &memory);
    uint64_t attended;
    tkv_status st;
    memset(&info, 0, sizeof info);
    CHECK_EQ(append_to_all_layers(kv, 2, 50, way % 8 == 7 ? 90 : 20, 90), TKV_OK);
    attended = attend(kv, 2);
    change_store(number, n_pages);
    memory.fail_at = way % 32 == 1 ? 1 + next_byte() % 40 : 0;
    st = tkv_seq_adopt_prefix(kv, &p, &callbacks, &info);
    memory.fail_at = 0;
    CHECK_MSG(st == TKV_OK || (st == TKV_ERR_NOMEM && way % 32 == 1) || (st == TKV_ERR_BUDGET && number == 5),
              "%d: %s", (int)st, tkv_get_last_error(kv));
    check_cache(kv);
    CHECK_EQ(tkv_get_length(kv, 0, TKV_ALL_LAYERS), info.n_tokens);
    CHECK_EQ(tkv_get_length(kv, SEQS - 1, TKV_ALL_LAYERS), 0);
    CHECK(info.n_pages >= 0 && info.n_pages <= n_pages && info.n_rejected >= 0 && info.n_rejected <= 1);
    CHECK(attend(kv, 2) == attended);
    n_adopted += info.n_pages;
    n_rejected += info.n_rejected;
    if (info.n_pages) go_on(kv, number, &info, number == 5);
    tkv_destroy(kv);
    CHECK_EQ(memory.held, 0);
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size) {
    begin_input(data, size);
    make_stores();
    run_input();
    end_input();
    return 0;
}

#ifdef TKV_FUZZ_MAIN
static int make_random(int seed, int n_bytes, uint8_t *bytes) {
    return random_bytes(seed, 8, n_bytes, 30, bytes);
}

int main(int argc, char **argv) {
    int n_runs;
    const int status = run_inputs(argc, argv, "prefixes", make_random, 30, 0, &n_runs);
    printf("%ld pages adopted, %ld rejected\n", n_adopted, n_rejected);
    return status;
}
#endif
