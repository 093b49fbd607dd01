/*
 * load.c - a fuzz target: the bytes of an input change a saved sequence, all sizes and checksums are repaired, and a
 * cache loads it. So the checks behind the checksums are reached.
 *
 * The library saves small sequences at the start: tables, evicted tokens, scores, anchors, moved tokens, forks, states,
 * windows, exact and coded formats. An input names one of them and changes to its sections: numbers of lists, entries,
 * blocks, tables and states; whole entries that are dropped, repeated, exchanged, or share a block; sections that
 * are cut, grown, or taken from another file. An input may also be a file as it is. The cache may have tables and
 * sequences of its own, another plan, a budget, or an allocator that fails. Some files are read through a callback.
 *
 * After a load: the cache passes its self-check, attends and reads, saves the sequence again, and a load of that gives
 * the same attention. Then the sequence goes on: appends, and calls that change it, also by tokens that come back from a
 * fork, and it is saved and loaded once more. After a refusal: no token is
 * there, the other sequences attend as before, an error has a sentence, and bytes that the cache holds are those from
 * before, if nothing of the file was placed. At the end no byte is held.
 *
 * Coverage-guided, with clang (`make fuzz TARGET=load` does the same):
 *     clang -g -O1 -DTKV_NO_SIMD -include assert.h -DTKV_ASSERT=assert -fsanitize=fuzzer,address,undefined \
 *         -fno-sanitize-recover=all tests/fuzz/load.c examples/tieredkv.c -o load -lm
 *     ./load -max_len=900 build/fuzz/load_inputs tests/data/load
 * As a plain program, with any compiler, for random inputs or for files of inputs:
 *     cc -O2 -DTKV_FUZZ_MAIN -include assert.h -DTKV_ASSERT=assert tests/fuzz/load.c examples/tieredkv.c -o load -lm
 *     ./load --runs 1000000 [--seed 1] [--bytes 60]     prints how many files each check refused
 *     ./load tests/data/load/?*
 */
#include "../saved_files.h"
#include "target.h"

enum {
    LAYERS = 2,
    SEQS = 7,
    CHUNK = 64,
    HEADS = 2, /* with one KV head */
    DIM = 8,
    N_FILES = 14, /* configs that saved a sequence */
    TWINS = 5,    /* files of each: other tokens, and tables of their own */
    FILE_BYTES = 1 << 16,
    MAX_SECTIONS = 32,
    MAX_RECORDS = 64,
    KINDS = 7, /* of sections: head, model, tokens, tables, records, lists, states */
    LIST = 48, /* bytes of the head of a list, of an entry, token_meta, scores, the header of a block */
    ENTRY = 48,
    META = 168,
    SCORES = 256,
    HEADER = 24
};

static size_t round_up(size_t n, size_t unit) { return (n + unit - 1) / unit * unit; }

/* >>saved sequences */
typedef struct saved_record {
    uint32_t layer;
    size_t at, bytes; /* in its section; without the checksum */
} saved_record;

typedef struct saved {
    uint8_t bytes[FILE_BYTES];
    size_t n;
    saved_record records[MAX_RECORDS];
    int n_records;
} saved;

static saved files[N_FILES][TWINS];
static uint8_t file_room[FILE_BYTES + 64], again[FILE_BYTES], again_2[FILE_BYTES];
static uint8_t *file; /* in file_room, at a multiple of 64: it may be attached */
static float k_in[CHUNK * DIM], v_in[CHUNK * DIM], k_out[1024 * DIM], v_out[1024 * DIM];
static counting_allocator memories[N_FILES + 1],
    *memory = &memories[N_FILES]; /* of idle caches; of the present one */

/* The config that saved file i, which is also the one that loads it. */
static tkv_config config_of(int i) {
    tkv_config c = make_sized_config(LAYERS, HEADS, 1, DIM, SEQS, CHUNK);
    c.tiers.hot_tokens = i == 7 ? 64 : TKV_OFF;
    c.tiers.warm_tokens = 64;
    c.tiers.warm = pair_of(TKV_KIVI4, TKV_KIVI4);
    c.tiers.archive = pair_of(TKV_KIVI2, TKV_KIVI2);
    if (i == 0) c.tiers.hot_tokens = TKV_UNLIMITED;
    if (i == 2 || i == 12) c.tiers.warm = c.tiers.archive = pair_of(TKV_A40, TKV_R40);
    if (i == 3)
        c.tiers.archive = pair_of(TKV_KVQUANT3, TKV_KVQUANT2), c.format.kvquant = TKV_KVQUANT_POST_ROPE;
    if (i >= 4 && i <= 6) c.evict.policy = i == 5 ? TKV_EVICT_H2O : TKV_EVICT_SLIDING;
    if (i == 5) c.tiers.n_anchors = 8, c.importance.sample_every = 1;
    if (i == 6) c.tiers.warm = c.tiers.archive = pair_of(TKV_A30, TKV_R30);
    if (i == 7 || i == 8 || i == 11) c.model.rope.dim = DIM;
    if (i == 9) c.model.window = 100, c.tiers.archive = pair_of(TKV_INT4, TKV_SUBSPACE4);
    if (i == 10) c.tiers.hot = pair_of(TKV_BF16, TKV_F32), c.tiers.warm = pair_of(TKV_FP8_E4M3, TKV_FP4);
    if (i == 11) c.model.v_in_k = 1;
    if (i == 12) c.tiers.archive = pair_of(TKV_SQUAT4, TKV_KIVI3);
    if (i == 13) c.importance.sample_every = 1, c.tiers.sink_tokens = TKV_OFF;
    return c;
}

static void append_rows(tkv_cache *kv, int seq, uint64_t seed, int n) {
    tkv_rng rng = tkv_rng_seed(seed);
    int layer, n_now;
    for (; n > 0; n -= n_now) {
        n_now = n < CHUNK ? n : CHUNK;
        for (layer = 0; layer < LAYERS; layer++) {
            tkv_rng_fill(&rng, k_in, (size_t)(n_now * DIM), 1.0);
            tkv_rng_fill(&rng, v_in, (size_t)(n_now * DIM), 1.0);
            CHECK_EQ(tkv_append(kv, seq, layer, k_in, v_in, n_now), TKV_OK);
        }
    }
}

static tkv_status attend(tkv_cache *kv, int seq, int layer, float *out) {
    float q[HEADS * DIM];
    int i;
    for (i = 0; i < HEADS * DIM; i++) q[i] = (float)((i * 37 + layer * 11) % 17 - 8) / 8.0f;
    return tkv_attend(kv, seq, layer, q, 1, out);
}

/* Changes sequence 0 as config i does it. Returns the sequence to save. */
static int change_sequence(tkv_cache *kv, int i) {
    uint64_t victims[4] = {0, 0x5555000000000ff0u, 0xffffffffffffffffu, 0x0f0f0f0f0f0f0f0fu};
    float out[HEADS * DIM];
    int n;
    if (i == 4 || i == 6) CHECK_EQ(tkv_seq_pin(kv, 0, 70, 5, TKV_UNLIMITED), TKV_OK);
    if (i == 4 || i == 6) CHECK_EQ(evict_tokens(kv, 0, TKV_ALL_LAYERS, victims, 200), TKV_OK);
    if (i == 7) CHECK_EQ(tkv_seq_remove(kv, 0, 70, 150), TKV_OK);
    if (i == 7) CHECK_EQ(tkv_seq_shift(kv, 0, 160, 200, 30), TKV_OK);
    if (i == 8) CHECK_EQ(tkv_seq_copy(kv, 0, 10, 200, 1, 0), TKV_OK);
    if (i == 8) CHECK_EQ(tkv_seq_fork(kv, 0, 2, 100), TKV_OK);
    for (n = 0; n < 10 && i >= 4; n++) CHECK_EQ(attend(kv, i == 8, n % 2, out), TKV_OK);
    for (n = 40; n < 200 && (i == 10 || i == 1); n += 40)
        CHECK_EQ(tkv_seq_put_state(kv, 0, n / 40 % 2, n, victims, (size_t)(n / 8)), TKV_OK);
    return i == 8;
}

static void make_file(int i, int twin) {
    static const int tokens[5] = {1, -2, 3, 4, 5};
    tkv_config cfg = config_of(i);
    tkv_cache *kv;
    tkv_save_params save = save_params(0);
    int n;
    cfg.host.allocator = counting_allocator_of(memory);
    kv = create_cache(&cfg);
    for (n = 0; n < (i ? 6 : 3); n++) { /* tables are learned from 256 tokens on */
        float out[HEADS * DIM];
        append_rows(kv, 0, (uint64_t)(1000 * i + 10 * twin + n), n == 2 ? 49 - twin : 64);
        if (i == 5 || i >= 12) CHECK_EQ(attend(kv, 0, 0, out) | attend(kv, 0, 1, out), TKV_OK);
    }
    if (i == 13) CHECK_EQ(tkv_seq_set_sinks(kv, 0, 350, 1, 1), TKV_OK);
    if (i % 7) CHECK_EQ(tkv_seq_flush(kv, 0, TKV_FLUSH_ALL), TKV_OK);
    save.seq = change_sequence(kv, i);
    save.tokens = tokens;
    save.n_tokens = i % 6;
    save.with_scores = i % 2;
    CHECK_EQ(tkv_seq_save(kv, &save, files[i][twin].bytes, FILE_BYTES, &files[i][twin].n), TKV_OK);
    tkv_destroy(kv);
}

static const uint8_t *find_in_file(const saved *f, uint32_t kind, uint32_t layer) {
    return find_in_index(f->bytes, f->n, kind, layer);
}

/* Finds the records of a layer by their checksums. They begin at multiples of 64. */
static void find_records(saved *f, uint32_t layer) {
    const uint8_t *e = find_in_file(f, SAVED_RECORDS, layer);
    const size_t from = e ? (size_t)get64(e + 8) : 0, n = e ? (size_t)get64(e + 16) : 0;
    size_t at = 0, bytes;
    while (at < n) {
        for (bytes = 8; at + bytes + 8 <= n; bytes += 8)
            if (get64(f->bytes + from + at + bytes) ==
                xxh64_of(f->bytes + from + at, bytes) + (uint64_t)(from + at))
                break;
        CHECK(at + bytes + 8 <= n && f->n_records < MAX_RECORDS);
        if (tkv_test_.n_bad) return;
        f->records[f->n_records].layer = layer;
        f->records[f->n_records].at = at;
        f->records[f->n_records++].bytes = bytes;
        at = round_up(at + bytes + 8, 64);
    }
}

static void make_files(void) {
    int i, twin, layer;
    file = file_room + (64 - (uintptr_t)file_room % 64) % 64;
    for (i = 0; i < N_FILES && !files[i][0].n; i++)
        for (twin = 0; twin < TWINS; twin++) {
            make_file(i, twin);
            for (layer = 0; layer < LAYERS; layer++) find_records(&files[i][twin], (uint32_t)layer);
        }
}

/* >>sections of a file */
typedef struct section {
    uint32_t kind, layer;
    uint8_t *at; /* in section_bytes */
    size_t n, room;
} section;

static section sections[MAX_SECTIONS];
static int n_sections;
static uint8_t section_bytes[4 * FILE_BYTES];
static size_t n_section_bytes;

/* Adds a section with room to grow. */
static section *add_section(uint32_t kind, uint32_t layer, const uint8_t *bytes, size_t n) {
    section *s;
    const size_t room = n + n / 2 + 512;
    if (n_sections == MAX_SECTIONS || room > sizeof section_bytes - n_section_bytes) return NULL;
    s = &sections[n_sections++];
    s->kind = kind;
    s->layer = layer;
    s->at = section_bytes + n_section_bytes;
    s->n = n;
    s->room = room;
    n_section_bytes += room;
    memcpy(s->at, bytes, n);
    return s;
}

/* Adds a list whose runs of entries and blocks have become single ones. Blocks name places in the section of records. */
static void add_list(const saved *f, const uint8_t *e) {
    static uint8_t bytes[FILE_BYTES];
    const uint8_t *list = f->bytes + get64(e + 8), *entries = list + LIST, *records;
    const uint8_t *headers = entries + ENTRY * get32(list + 40), *meta = headers + HEADER * get32(list + 44);
    const size_t n_meta = (size_t)get64(e + 16) - (size_t)(meta - list);
    uint32_t i, k, stride, n_headers = get32(list + 44);
    size_t n = LIST;
    records = find_in_file(f, SAVED_RECORDS, get32(e + 4));
    memcpy(bytes, list, LIST);
    put32(bytes + 40, get32(list));
    put32(bytes + 44, get32(list + 36));
    for (i = 0; i < get32(list + 40); i++)
        for (k = 0; k < get32(entries + ENTRY * i + 12); k++, n += ENTRY) {
            memcpy(bytes + n, entries + ENTRY * i, ENTRY);
            put32(bytes + n, get32(bytes + n) + k);
            put32(bytes + n + 4, get32(bytes + n + 4) + k);
            put32(bytes + n + 8, get32(bytes + n + 8) + k * bytes[n + 29]);
            put32(bytes + n + 12, 1);
            bytes[n + 29] = 0;
        }
    for (i = 0; i < n_headers; i++) {
        const uint8_t *h = headers + HEADER * i;
        const uint64_t end =
            i + 1 < n_headers ? get64(h + HEADER + 16) : get64(records + 8) + get64(records + 16);
        stride = (uint32_t)(end - get64(h + 16)) / get32(h + 12);
        for (k = 0; k < get32(h + 12); k++, n += HEADER) {
            memcpy(bytes + n, h, HEADER);
            put32(bytes + n + 8, get32(h + 8) + k * h[5]);
            put32(bytes + n + 12, 1);
            put64(bytes + n + 16, get64(h + 16) - get64(records + 8) + (uint64_t)k * stride);
            bytes[n + 5] = 0;
        }
    }
    memcpy(bytes + n, meta, n_meta);
    (void)add_section(SAVED_LISTS, get32(e + 4), bytes, n + n_meta);
}

static const saved *opened;

static void open_file(const saved *f) {
    const uint8_t *e;
    n_sections = 0;
    n_section_bytes = 0;
    opened = f;
    for (e = f->bytes + get64(f->bytes + f->n - SAVED_END); e + 32 <= f->bytes + f->n - SAVED_END; e += 32)
        if (get32(e) == SAVED_LISTS) add_list(f, e);
        else (void)add_section(get32(e), get32(e + 4), f->bytes + get64(e + 8), (size_t)get64(e + 16));
}

/* The section of a kind and layer; NULL: none. */
static section *find_section(int kind, int layer) {
    int i;
    for (i = 0; i < n_sections; i++)
        if (sections[i].kind == (uint32_t)kind && sections[i].layer == (uint32_t)layer) return &sections[i];
    return NULL;
}

/* Entries and blocks that a list names, as far as its bytes go. */
static size_t n_entries(const section *list) {
    if (!list || list->n < LIST) return 0;
    return get32(list->at + 40) < (list->n - LIST) / ENTRY ? get32(list->at + 40) : (list->n - LIST) / ENTRY;
}

static size_t n_blocks_of(const section *list) {
    const size_t left = list && list->n >= LIST ? (list->n - LIST - ENTRY * n_entries(list)) / HEADER : 0;
    return left && get32(list->at + 44) < left ? get32(list->at + 44) : left;
}

static size_t block_at(const section *list, size_t i) { return LIST + ENTRY * n_entries(list) + HEADER * i; }
static size_t meta_at(const section *list) { return block_at(list, n_blocks_of(list)); }

/* Repairs the checksums of the records of a layer, which begin at `at` of `file`, and what its list says of them. */
static void repair_records(const section *s, size_t at, size_t list_at) {
    const section *list = find_section(SAVED_LISTS, (int)s->layer);
    size_t i;
    for (i = 0; opened && i < (size_t)opened->n_records; i++) {
        const saved_record *r = &opened->records[i];
        if (r->layer == s->layer && r->at + r->bytes + 8 <= s->n)
            put64(file + at + r->at + r->bytes,
                  xxh64_of(file + at + r->at, r->bytes) + (uint64_t)(at + r->at));
    }
    for (i = 0; i < n_blocks_of(list); i++)
        put64(file + list_at + block_at(list, i) + 16, get64(list->at + block_at(list, i) + 16) + at);
}

/* Writes the sections, the index and all checksums to `file`. Returns the bytes; 0: they are too many. */
static size_t write_file(void) {
    static size_t place[MAX_SECTIONS];
    size_t at = 0, index, i, j, end;
    for (i = 0; i < (size_t)n_sections; i++) at = round_up(at, 64) + sections[i].n;
    end = round_up(at + (size_t)n_sections * 32 + SAVED_END, 64);
    index = end - SAVED_END - (size_t)n_sections * 32;
    if (end > FILE_BYTES) return 0;
    memset(file, 0, end);
    if (n_sections && sections[0].n >= 16) put64(sections[0].at + 8, end);
    for (i = 0, at = 0; i < (size_t)n_sections; i++) {
        at = place[i] = round_up(at, 64);
        memcpy(file + at, sections[i].at, sections[i].n);
        at += sections[i].n;
    }
    for (i = 0; i < (size_t)n_sections; i++)
        for (j = 0; j < (size_t)n_sections && sections[i].kind == SAVED_RECORDS; j++)
            if (&sections[j] == find_section(SAVED_LISTS, (int)sections[i].layer))
                repair_records(&sections[i], place[i], place[j]);
    for (i = 0; i < (size_t)n_sections; i++) {
        const section *s = &sections[i];
        uint8_t *e = file + index + 32 * i;
        put32(e, s->kind);
        put32(e + 4, s->layer);
        put64(e + 8, place[i]);
        put64(e + 16, s->n);
        put64(e + 24, s->kind == SAVED_RECORDS ? 0 : xxh64_of(file + place[i], s->n));
    }
    put64(file + end - SAVED_END, index);
    put32(file + end - SAVED_END + 16, (uint32_t)n_sections);
    put32(file + end - SAVED_END + 20, get32(file + 4));
    put64(file + end - SAVED_END + 24, xxh64_of(file + index, end - 16 - index));
    memcpy(file + end - 8, "TKVSEND", 8);
    return end;
}

/* Makes n bytes at `at` of a section `to` bytes long. New ones are zero. Returns 0 without room. */
static int resize_bytes(section *s, size_t at, size_t n, size_t to) {
    if (at > s->n || n > s->n - at || s->n - n + to > s->room) return 0;
    memmove(s->at + at + to, s->at + at + n, s->n - at - n);
    if (to > n) memset(s->at + at + n, 0, to - n);
    s->n = s->n - n + to;
    return 1;
}

/* >>numbers of a file: groups of fields that repeat */
typedef struct field {
    int at, bytes;
} field;

static const field list_fields[] = {{0, 4},  {4, 4},  {8, 4},  {12, 4}, {16, 4}, {20, 4},
                                    {24, 4}, {28, 4}, {32, 4}, {36, 4}, {40, 4}, {44, 4}};
static const field entry_fields[] = {{0, 4},  {4, 4},  {8, 4},  {12, 4}, {16, 4}, {20, 4}, {24, 1}, {25, 1},
                                     {26, 1}, {27, 1}, {28, 1}, {29, 1}, {30, 1}, {32, 8}, {40, 8}};
static const field meta_fields[] = {{0, 8},  {8, 8},  {16, 8}, {24, 4}, {28, 4}, {32, 4},  {36, 4},
                                    {40, 2}, {42, 2}, {44, 4}, {48, 4}, {68, 4}, {164, 4}, {168, 4}};
static const field block_fields[] = {{0, 1}, {1, 1}, {2, 1}, {3, 1},  {4, 1},
                                     {5, 1}, {6, 1}, {8, 4}, {12, 4}, {16, 8}};
static const field table_fields[] = {{0, 4},  {4, 4},  {8, 4},  {12, 4}, {16, 2},
                                     {18, 2}, {20, 1}, {21, 1}, {22, 1}};
static const field state_fields[] = {{0, 4}, {4, 4}, {8, 8}};
static const field head_fields[] = {{0, 4}, {4, 4}, {16, 8}, {24, 4}, {28, 4}, {32, 4}, {36, 4}, {60, 4}};
static const field word_fields[] = {{0, 4}, {4, 4}, {8, 8}};

typedef struct record {
    section *s;
    size_t at;
    const field *fields;
    int n_fields;
} record;

static int saved_has_meta(void) {
    return n_sections && sections[0].n >= 36 && (get32(sections[0].at + 32) & 1);
}

static size_t meta_bytes(void) { return META + (get32(sections[0].at + 32) & 2 ? (size_t)SCORES : 0u); }

static record make_record(section *s, size_t at, const field *fields, int n_fields) {
    record r;
    r.s = s;
    r.at = at;
    r.fields = fields;
    r.n_fields = n_fields;
    return r;
}

/* A record of a kind that the input chooses. s NULL: there is none. */
static record choose_record(void) {
    const int what = next_byte() % 16, layer = next_byte() % LAYERS, i = next_byte();
    section *list = find_section(SAVED_LISTS, layer), *s;
    const size_t n = n_entries(list), n_blocks = n_blocks_of(list);
    if (what < 3 && list) return make_record(list, 0, list_fields, COUNT(list_fields));
    if (what < 8 && n)
        return make_record(list, LIST + ENTRY * ((size_t)i % n), entry_fields, COUNT(entry_fields));
    if (what < 10 && n && saved_has_meta())
        return make_record(list, meta_at(list) + meta_bytes() * ((size_t)i % n), meta_fields,
                           COUNT(meta_fields));
    if (what < 12 && n_blocks)
        return make_record(list, block_at(list, (size_t)i % n_blocks), block_fields, COUNT(block_fields));
    if (what == 12) return make_record(find_section(3, layer), 0, table_fields, COUNT(table_fields));
    if (what == 13) return make_record(find_section(6, 0), 0, state_fields, COUNT(state_fields));
    if (what == 14) return make_record(find_section(0, 0), 0, head_fields, COUNT(head_fields));
    s = n_sections ? &sections[i % n_sections] : NULL;
    return make_record(s, s && s->n >= 4 ? 4 * ((size_t)next_below(1 << 14) % (s->n / 4)) : 0, word_fields,
                       COUNT(word_fields));
}

/* A number of n bytes, from the one that was there. */
static uint64_t choose_number(uint64_t was, int n) {
    static const uint64_t numbers[] = {0,
                                       1,
                                       2,
                                       4,
                                       5,
                                       31,
                                       32,
                                       33,
                                       63,
                                       64,
                                       65,
                                       127,
                                       128,
                                       192,
                                       241,
                                       255,
                                       256,
                                       0x7fff,
                                       0xffff,
                                       0x3fffffff,
                                       0x40000000,
                                       0x40000001,
                                       0x7fffffff,
                                       0x80000000u,
                                       0xffffffc0u,
                                       0xfffffffeu,
                                       0xffffffffu,
                                       0x100000000u,
                                       0x7fffffffffffffffu,
                                       0x8000000000000000u,
                                       ~(uint64_t)0};
    const int how = next_byte();
    uint64_t x = 0;
    int i;
    if (how < 60) return was + (uint64_t)(how - 30);
    if (how < 90) return was ^ (uint64_t)1 << next_byte() % 64;
    if (how < 110) return was + 64u * (uint64_t)(how - 100);
    if (how < 200) return numbers[how % COUNT(numbers)];
    for (i = 0; i < n; i++) x = x << 8 | (uint64_t)next_byte();
    return x;
}

static void change_field(void) {
    const record r = choose_record();
    const field f = r.fields[next_byte() % r.n_fields];
    uint64_t x = 0;
    uint8_t *at;
    int i;
    if (!r.s || r.at + (size_t)(f.at + f.bytes) > r.s->n) return;
    at = r.s->at + r.at + f.at;
    for (i = 0; i < f.bytes; i++) x |= (uint64_t)at[i] << 8 * i;
    x = choose_number(x, f.bytes);
    for (i = 0; i < f.bytes; i++) at[i] = (uint8_t)(x >> 8 * i & 255u);
}

static void change_byte(void) {
    section *s = n_sections ? &sections[next_byte() % n_sections] : NULL;
    const size_t at = (size_t)next_below(1 << 16);
    const int x = next_byte();
    if (s && s->n) s->at[at % s->n] = (uint8_t)x;
}

/* >>changes of whole parts */
/* Repeats entry i of a layer with its meta and block, or drops it. Both blocks then have one record. */
static void repeat_or_drop_entry(int is_drop) {
    section *list = find_section(SAVED_LISTS, next_byte() % LAYERS);
    const size_t n = n_entries(list), i = n ? (size_t)next_byte() % n : 0, add = is_drop ? 0 : 2;
    size_t k;
    if (!n || n_blocks_of(list) != n) return; /* an entry shares a block */
    if (saved_has_meta()) {
        k = meta_at(list) + meta_bytes() * i;
        if (!resize_bytes(list, k, meta_bytes(), add * meta_bytes())) return;
        if (add) memcpy(list->at + k + meta_bytes(), list->at + k, meta_bytes());
    }
    k = block_at(list, i);
    if (!resize_bytes(list, k, HEADER, add * HEADER)) return;
    if (add) memcpy(list->at + k + HEADER, list->at + k, HEADER);
    k = LIST + ENTRY * i;
    if (!resize_bytes(list, k, ENTRY, add * ENTRY)) return;
    if (add) memcpy(list->at + k + ENTRY, list->at + k, ENTRY);
    put32(list->at, (uint32_t)(n + add - 1));
    for (k = 36; k < 48; k += 4) put32(list->at + k, (uint32_t)(n + add - 1));
    for (k = 0; k < n_entries(list); k++) { /* each has its own block; entries behind move by a block */
        uint8_t *other = list->at + LIST + ENTRY * k;
        put32(other, (uint32_t)k);
        put32(other + 4, (uint32_t)k);
        if (k > i || (is_drop && k == i)) put32(other + 8, get32(other + 8) + (is_drop ? 0u - 64u : 64u));
    }
    put32(list->at + 20, get32(list->at + 20) + (is_drop ? 0u - 64u : 64u));
    if (next_byte() % 4)
        put32(list->at + 4 + 4 * (next_byte() % 3), get32(list->at + 8) + (uint32_t)add - 1u);
}

/* Makes one run of two entries or blocks, or gives a run a length. */
static void join_runs(void) {
    section *list = find_section(SAVED_LISTS, next_byte() % LAYERS);
    const size_t n = n_entries(list), n_blocks = n_blocks_of(list), i = (size_t)next_byte();
    const int how = next_byte();
    uint8_t *at;
    if (n < 2 || n_blocks < 2) return;
    if (how & 1) {
        at = list->at + LIST + ENTRY * (i % (n - 1));
        at[29] = (uint8_t)(get32(at + ENTRY + 8) - get32(at + 8));
        put32(at + 12, 2);
        if (!resize_bytes(list, LIST + ENTRY * (i % (n - 1) + 1), ENTRY, 0)) return;
        put32(list->at + 40, (uint32_t)(n - 1));
    }
    if (how & 2) {
        const size_t b = block_at(list, i % (n_blocks - 1));
        at = list->at + b;
        at[5] = (uint8_t)(get32(at + HEADER + 8) - get32(at + 8));
        put32(at + 12, 2);
        if (!resize_bytes(list, b + HEADER, HEADER, 0)) return;
        put32(list->at + 44, (uint32_t)(n_blocks - 1));
    }
    if (how & 4) put32(list->at + LIST + ENTRY * (i % n_entries(list)) + 12, (uint32_t)how / 8);
}

/* Exchanges two entries of a layer, or gives one the numbers of the other; positions may stay. */
static void mix_entries(void) {
    section *list = find_section(SAVED_LISTS, next_byte() % LAYERS);
    const size_t n = n_entries(list);
    uint8_t *a, *b, was[ENTRY];
    int how;
    if (!n) return;
    a = list->at + LIST + ENTRY * ((size_t)next_byte() % n);
    b = list->at + LIST + ENTRY * ((size_t)next_byte() % n);
    how = next_byte();
    memcpy(was, a, ENTRY);
    if (how & 1) memcpy(a + (how & 2 ? 16 : 4), b + (how & 2 ? 16 : 4), how & 2 ? ENTRY - 16 : ENTRY - 4);
    if (how & 4) memcpy(b + (how & 2 ? 16 : 4), was + (how & 2 ? 16 : 4), how & 2 ? ENTRY - 16 : ENTRY - 4);
    if (how & 8) memcpy(a + 4, b + 4, 4);
}

/* Other lengths of the tiers, with entries and, if the input says so, blocks that have these tiers. */
static void move_tiers(void) {
    const int layer = next_byte() % LAYERS;
    section *list = find_section(SAVED_LISTS, layer);
    const size_t n = n_entries(list);
    const int with_blocks = next_byte() % 4 == 0;
    size_t i, sinks, archive, warm;
    if (!n) return;
    sinks = (size_t)next_byte() % (n + 1);
    archive = (size_t)next_byte() % (n + 1 - sinks);
    warm = (size_t)next_byte() % (n + 1 - sinks - archive);
    put32(list->at + 4, (uint32_t)sinks);
    put32(list->at + 8, (uint32_t)archive);
    put32(list->at + 12, (uint32_t)warm);
    for (i = 0; i < n; i++) {
        const int tier = i < sinks                    ? TKV_TIER_HOT
                         : i < sinks + archive        ? TKV_TIER_ARCHIVE
                         : i < sinks + archive + warm ? TKV_TIER_WARM
                                                      : TKV_TIER_HOT;
        list->at[LIST + ENTRY * i + 27] = (uint8_t)tier;
        if (with_blocks && i < n_blocks_of(list)) list->at[block_at(list, i) + 3] = (uint8_t)tier;
    }
}

/* Adds a number to the starts of entries from one on, and to the length. */
static void move_starts(void) {
    section *list = find_section(SAVED_LISTS, next_byte() % LAYERS);
    const size_t n = n_entries(list);
    size_t i, from;
    const uint32_t by = (uint32_t)(next_byte() - 128) * (next_byte() % 4 ? 1u : 64u);
    if (!n) return;
    from = (size_t)next_byte() % (n + 1);
    for (i = from; i < n; i++)
        put32(list->at + LIST + ENTRY * i + 8, get32(list->at + LIST + ENTRY * i + 8) + by);
    if (next_byte() % 8) put32(list->at + 20, get32(list->at + 20) + by);
}

/* Makes entry i a list of indices of `n_packed` tokens, or ends it at a slot. */
static void pack_entry(void) {
    section *list = find_section(SAVED_LISTS, next_byte() % LAYERS);
    const size_t n = n_entries(list), i = n ? (size_t)next_byte() % n : 0;
    const int count = next_byte() % 65, how = next_byte();
    uint8_t *e, *m;
    int t;
    if (!n) return;
    e = list->at + LIST + ENTRY * i;
    if (how & 1) put64(e + 32, how & 2 ? ~(uint64_t)0 << count % 64 : get64(e + 32));
    if (how & 4) e[25] = (uint8_t)(count / 2), e[26] = (uint8_t)count;
    if (!saved_has_meta() || !(how & 8)) return;
    e[24] = (uint8_t)count;
    m = list->at + meta_at(list) + meta_bytes() * i;
    for (t = 0; t < 64; t++) {
        const int index = t < count ? t * (1 + how % 3) : 0;
        m[40 + 2 * t] = (uint8_t)(index & 255);
        m[41 + 2 * t] = (uint8_t)(index >> 8);
    }
}

static void resize_section(void) {
    section *s = n_sections ? &sections[next_byte() % n_sections] : NULL;
    static const int units[] = {1, 4, 8, 24, 32, 48, 64, 168};
    const size_t unit = (size_t)units[next_byte() % COUNT(units)], n = unit * (size_t)(next_byte() % 4);
    const size_t at = (size_t)next_below(1 << 14);
    if (!s || !s->n) return;
    if (next_byte() % 2) (void)resize_bytes(s, at % s->n, 0, n);
    else (void)resize_bytes(s, at % s->n, n <= s->n - at % s->n ? n : 0, 0);
}

/* Drops a section, names it otherwise, exchanges two, or takes one from another file. */
static void change_sections(void) {
    const int how = next_byte() % 5, i = n_sections ? next_byte() % n_sections : 0;
    const int j = n_sections ? next_byte() % n_sections : 0;
    const saved *from = &files[next_byte() % N_FILES][next_byte() % TWINS];
    const section was = sections[i];
    if (!n_sections) return;
    if (how == 0) {
        memmove(&sections[i], &sections[i + 1], (size_t)(n_sections - i - 1) * sizeof *sections);
        n_sections--;
    } else if (how == 1) {
        sections[i].kind = (uint32_t)(next_byte() % (KINDS + 2));
        sections[i].layer = (uint32_t)(next_byte() % (LAYERS + 2));
    } else if (how == 2) {
        sections[i].at = sections[j].at, sections[i].n = sections[j].n, sections[i].room = sections[j].room;
        sections[j].at = was.at, sections[j].n = was.n, sections[j].room = was.room;
    } else {
        const uint8_t *e = find_in_file(from, was.kind, was.layer);
        if (e && get64(e + 16) <= was.room) {
            memcpy(was.at, from->bytes + get64(e + 8), (size_t)get64(e + 16));
            sections[i].n = (size_t)get64(e + 16);
        }
    }
}

/* Adds a second table to a layer: the one of another file, or the same bytes with another version. */
static void add_table(int number) {
    const int layer = next_byte() % LAYERS, twin = next_byte() % TWINS;
    section *s = find_section(3, layer);
    const saved *from = &files[number][twin];
    const uint8_t *e = find_in_file(from, 3, (uint32_t)layer);
    size_t n, at;
    const uint32_t version = (uint32_t)(next_byte() % 4);
    if (!s || s->n < 16) return;
    if (!e || get64(e + 16) <= 16) return;
    n = (size_t)get64(e + 16) - 8;
    at = s->n;
    if (!resize_bytes(s, at, 0, n)) return;
    memcpy(s->at + at, from->bytes + get64(e + 8) + 8, n);
    put32(s->at + at, version);
    put32(s->at + at + 4, (uint32_t)(next_byte() % 8 == 0));
    put32(s->at + 4, get32(s->at + 4) + 1);
}

/* Makes blocks of a layer use another version of the table. */
static void change_versions(void) {
    const int layer = next_byte() % LAYERS, version = next_byte() % 4, from = next_byte(),
              step = 1 + next_byte() % 3;
    section *list = find_section(SAVED_LISTS, layer);
    size_t i;
    for (i = (size_t)from % 8; i < n_blocks_of(list); i += (size_t)step)
        if (list->at[block_at(list, i) + 4] != 255) list->at[block_at(list, i) + 4] = (uint8_t)version;
}

static void change_file(int number) {
    const int what = next_byte() % 32;
    if (what < 14) change_field();
    else if (what < 16) change_byte();
    else if (what < 18) repeat_or_drop_entry(what == 17);
    else if (what == 18) join_runs();
    else if (what < 21) mix_entries();
    else if (what < 23) move_tiers();
    else if (what < 25) move_starts();
    else if (what < 27) pack_entry();
    else if (what == 27) resize_section();
    else if (what == 28) change_sections();
    else if (what < 31) add_table(number);
    else change_versions();
}

/* >>a load, and what follows */
typedef struct answers {
    tkv_status st[LAYERS];
    float out[LAYERS][HEADS * DIM];
} answers;

static answers ask(tkv_cache *kv, int seq) {
    answers a;
    int layer;
    memset(&a, 0, sizeof a);
    for (layer = 0; layer < LAYERS; layer++) a.st[layer] = attend(kv, seq, layer, a.out[layer]);
    return a;
}

static size_t held_bytes(const tkv_cache *kv) {
    tkv_memory_info m;
    CHECK_EQ(tkv_get_memory(kv, &m), TKV_OK);
    CHECK_EQ(m.total, memory->held);
    return m.total;
}

static long n_loaded, n_refused,
    n_verified; /* n_verified: refused after its numbers were checked one by one */
static struct {
    char text[100];
    long n;
} refusals[200];

/* Counts a refusal by its sentence, without its digits. */
static void count_refusal(const char *sentence) {
    char text[100];
    int i, n = 0;
    for (i = 0; sentence[i] && n < (int)sizeof text - 1; i++)
        if (sentence[i] < '0' || sentence[i] > '9') text[n++] = sentence[i];
    text[n] = 0;
    for (i = 0; i < COUNT(refusals) - 1 && refusals[i].text[0] && strcmp(refusals[i].text, text) != 0; i++)
        continue;
    memcpy(refusals[i].text, text, (size_t)n + 1);
    refusals[i].n++;
}

/* Saves what was loaded, loads that, and compares. may_fail: bytes or tokens of the cache have a limit. */
static void save_again(tkv_cache *kv, int may_fail, int is_attached) {
    tkv_save_params save = save_params(0);
    const tkv_load_params load = load_params(SEQS - 1);
    const answers before = ask(kv, 0);
    answers after;
    size_t n = 0, n_2 = 0;
    tkv_status st;
    save.with_scores = 1;
    st = tkv_seq_save(kv, &save, again, sizeof again, &n);
    CHECK(st == TKV_OK || (may_fail && (st == TKV_ERR_NOMEM || st == TKV_ERR_BUDGET)) || n > sizeof again ||
          (is_attached && st == TKV_ERR_DATA));
    if (st) return;
    st = tkv_seq_load(kv, &load, again, n, NULL);
    CHECK_MSG(st == TKV_OK ||
                  (may_fail && (st == TKV_ERR_NOMEM || st == TKV_ERR_BUDGET || st == TKV_ERR_CAPACITY)),
              "what was loaded and saved is refused: %s", tkv_get_last_error(kv));
    if (st) return;
    check_cache(kv);
    after = ask(kv, SEQS - 1);
    if (!may_fail) CHECK_MEM(&before, &after, sizeof before);
    save.seq = SEQS - 1;
    CHECK_EQ(tkv_seq_save(kv, &save, again_2, sizeof again_2, &n_2), TKV_OK);
    if (!may_fail) CHECK(n_2 <= n); /* equal tables have become one */
    CHECK_EQ(tkv_seq_reset(kv, SEQS - 1), TKV_OK);
}

/* One call that changes the sequence, with arguments from the input. */
static void make_call(tkv_cache *kv) {
    const int len = tkv_get_length(kv, 0, TKV_ALL_LAYERS), byte = next_byte(), a = next_below(300),
              b = next_below(300), what = byte < 180 ? byte % 9 : 9 + byte % 5;
    uint64_t victims[8];
    int i, done = 0, places[2], indices[4];
    for (i = 0; i < 8; i++) victims[i] = (uint64_t)next_byte() * 0x0101010101010101u;
    if (what == 0) (void)tkv_seq_truncate(kv, 0, a);
    if (what == 1) (void)tkv_seq_remove(kv, 0, a, a + b);
    if (what == 2) (void)tkv_seq_shift(kv, 0, a, a + b, next_byte() - 128);
    if (what == 3) (void)evict_tokens(kv, 0, TKV_ALL_LAYERS, victims, len < 512 ? len : 512);
    if (what == 4) (void)tkv_seq_fork(kv, 0, SEQS - 1, a);
    if (what == 5) (void)tkv_seq_copy(kv, 0, a, a + b, SEQS - 1, 0);
    if (what == 6) (void)tkv_seq_pin(kv, 0, a, b, b);
    if (what == 7) (void)tkv_promote(kv, 0, next_byte() % LAYERS, a);
    if (what == 8) (void)tkv_seq_slide(kv, 0, a, &done);
    for (i = 0; i < 4; i++) indices[i] = len - 4 + i - (int)(victims[i] % 3);
    if (what == 9) (void)tkv_seq_keep(kv, 0, a, indices + b % 4, 4 - b % 4);
    places[0] = a % 2;
    places[1] = b % 2;
    if (what == 10) (void)tkv_seq_reorder(kv, SEQS - 2, places, 2);
    if (what == 11) (void)tkv_seq_copy(kv, SEQS - 1, a, a + b, 0, a + len);
    if (what >= 12) { /* tokens come back from a fork, so that the list can hold a block twice */
        (void)tkv_seq_reset(kv, SEQS - 1);
        (void)tkv_seq_fork(kv, 0, SEQS - 1, what == 12 ? TKV_UNLIMITED : 1 + a);
        if (what == 13) (void)tkv_seq_remove(kv, 0, a / 2, a / 2 + b);
        (void)tkv_seq_copy(kv, SEQS - 1, what == 12 ? 0 : b, TKV_UNLIMITED, 0, what == 12 ? 0 : len + b);
    }
    check_cache(kv);
}

/* Appends a few tokens as a step, or as single calls if the step is refused. */
static void append_step(tkv_cache *kv) {
    const int n = 1 + next_byte() % CHUNK;
    int layer, i;
    tkv_status st = tkv_seq_begin(kv, 0);
    for (i = 0; i < n * DIM; i++) k_in[i] = v_in[i] = (float)((i * 31 % 61) - 30) / 16.0f;
    for (layer = 0; layer < LAYERS && !st; layer++) st = tkv_append(kv, 0, layer, k_in, v_in, n);
    if (!st) st = tkv_seq_commit(kv, 0);
    if (st) (void)tkv_seq_abort(kv, 0);
    if (st) (void)tkv_append(kv, 0, 0, k_in, v_in, n);
    check_cache(kv);
}

static void read_all(tkv_cache *kv) {
    int layer;
    for (layer = 0; layer < LAYERS; layer++) {
        const int len = tkv_get_length(kv, 0, layer);
        if (len > 0 && len <= 1024) (void)tkv_read(kv, 0, layer, 0, len, k_out, v_out);
    }
}

static void go_on(tkv_cache *kv, const tkv_load_info *info, int may_fail) {
    const int is_short =
        next_byte() % 4 != 0; /* of 4 loads with bytes left, one goes on: that takes most of the time */
    int layer, n;
    n_loaded++;
    CHECK_EQ(info->n_tokens, tkv_get_length(kv, 0, TKV_ALL_LAYERS));
    check_cache(kv);
    (void)held_bytes(kv);
    for (layer = 0; layer < LAYERS; layer++)
        if (tkv_get_length(kv, 0, layer) > 0) {
            float out[HEADS * DIM];
            const tkv_status st = attend(kv, 0, layer, out);
            /* a query may see no token; an attached block is verified now */
            CHECK(st == TKV_OK || st == TKV_ERR_RANGE || (info->n_attached && st == TKV_ERR_DATA));
        }
    if (is_short) return;
    read_all(kv);
    save_again(kv, may_fail, info->n_attached > 0);
    append_step(kv);
    for (n = 1 + next_byte() % 3; n > 0; n--) make_call(kv);
    CHECK_EQ(tkv_seq_reset(kv, SEQS - 2) | tkv_seq_reset(kv, SEQS - 1), TKV_OK);
    if (tkv_get_length(kv, 0, 0) && tkv_get_length(kv, 0, 1)) save_again(kv, may_fail, info->n_attached > 0);
    append_step(kv);
    (void)ask(kv, 0);
    read_all(kv);
    CHECK_EQ(tkv_seq_reset(kv, 0), TKV_OK);
    check_cache(kv);
}

static void check_refusal(tkv_cache *kv, tkv_status st, size_t held, int was_placed) {
    int layer;
    n_refused++;
    if (was_placed) n_verified++;
    CHECK(st == TKV_ERR_DATA || st == TKV_ERR_CONFIG || st == TKV_ERR_CAPACITY || st == TKV_ERR_NOMEM ||
          st == TKV_ERR_BUDGET);
    CHECK(tkv_get_last_error(kv)[0] != 0);
    count_refusal(tkv_get_last_error(kv));
    for (layer = 0; layer < LAYERS; layer++) CHECK_EQ(tkv_get_length(kv, 0, layer), 0);
    if (!was_placed) CHECK_EQ(memory->held, held);
    if (!was_placed && n_refused % 64) return; /* it has not asked for memory, and changes nothing */
    check_cache(kv);
    (void)held_bytes(kv);
}

/* >>caches. One of each config and plan stays while loads are refused before they ask for memory-> */
static tkv_cache *idle[N_FILES];

typedef struct surroundings {                  /* of a load */
    int plan, n_twins, fail_at, attach, reads; /* reads: 1: through a callback */
} surroundings;

static surroundings choose_surroundings(void) {
    surroundings s;
    const int byte = next_byte();
    s.plan = byte % 32 < 24 ? 0 : byte % 32 - 23;
    s.n_twins = byte / 32 < 5 ? 0 : 1 + byte / 32 % 2 * 3;
    s.fail_at = s.plan == 4 ? 1 + next_byte() % 24 : 0;
    s.attach = next_byte() % 4;
    s.reads = s.attach == 1;
    s.attach = s.attach == 0;
    return s;
}

static tkv_cache *create_for(int number, const surroundings *s) {
    static const tkv_level ladder[] = {{64, 64, {TKV_KIVI4, TKV_KIVI4}, {TKV_KIVI2, TKV_KIVI2}, 0}};
    tkv_config cfg = config_of(number);
    tkv_cache *kv;
    int i;
    if (s->plan == 1) cfg.limits.max_tokens = 330;
    if (s->plan == 2) cfg.tiers.warm_tokens = 200, cfg.limits.max_append = 2 * CHUNK;
    if (s->plan == 5) cfg.tiers.hot_tokens = TKV_UNLIMITED;
    if (s->plan == 6) cfg.tiers.warm_tokens = TKV_OFF;
    if (s->plan == 7) cfg.tiers.hot_tokens = TKV_OFF;
    if (s->plan == 8) cfg.tiers.warm_tokens = TKV_UNLIMITED;
    if (s->plan == 3) {
        cfg.budget.bytes = 40000;
        if (number == 1 || number == 4) cfg.budget.ladder = ladder, cfg.budget.n_levels = 1;
    }
    cfg.host.allocator = counting_allocator_of(memory);
    if (tkv_create(&cfg, &kv)) return NULL; /* this config has no budget */
    for (i = 1; i <= s->n_twins && i < TWINS; i++) {
        const tkv_load_params load = load_params(i);
        const tkv_status st = tkv_seq_load(kv, &load, files[number][i].bytes, files[number][i].n, NULL);
        CHECK(st == TKV_OK ||
              (s->plan && (st == TKV_ERR_BUDGET || st == TKV_ERR_CAPACITY || st == TKV_ERR_CONFIG)));
    }
    return kv;
}

/* 1 if file `number` has tables: a cache with more of them codes blocks again. */
static int has_tables(int number) {
    const saved *f = &files[number][0];
    int layer;
    for (layer = 0; layer < LAYERS; layer++) {
        const uint8_t *e = find_in_file(f, 3, (uint32_t)layer);
        if (e && get32(f->bytes + get64(e + 8)) != 0) return 1;
    }
    return 0;
}

/* Loads the first n bytes of `file` into a cache of config `number`. */
static void run_load(int number, const surroundings *s, size_t n) {
    const int is_plain = s->plan == 0 && s->n_twins == 0 && !s->attach && !s->reads;
    read_file f = read_file_of(file, n);
    tkv_load_params load = load_params(0);
    answers before[TWINS], after;
    tkv_load_info info;
    tkv_cache *kv;
    size_t held;
    tkv_status st;
    int i;
    memset(&info, 0, sizeof info);
    load.attach = s->attach;
    memory = &memories[is_plain ? number : N_FILES];
    kv = is_plain && idle[number] ? idle[number] : create_for(number, s);
    if (!kv) return;
    held = memory->held;
    for (i = 1; i <= s->n_twins; i++) before[i] = ask(kv, i);
    memory->n_requests = 0;
    memory->fail_at = s->fail_at;
    st = s->reads ? tkv_seq_load_from(kv, &load, n, read_from_file, &f, &info)
                  : tkv_seq_load(kv, &load, file, n, &info);
    memory->fail_at = 0;
    if (st) check_refusal(kv, st, held, memory->n_requests > 0);
    for (i = 1; i <= s->n_twins && s->plan != 3 && !has_tables(number); i++) {
        after = ask(kv, i);
        CHECK_MEM(&after, &before[i], sizeof after);
    }
    idle[number] = is_plain && st && !memory->n_requests ? kv : is_plain ? NULL : idle[number];
    if (!st) go_on(kv, &info, s->plan == 1 || s->plan == 3 || s->plan == 4);
    if (idle[number] == kv) return;
    tkv_destroy(kv);
    CHECK_EQ(memory->held, 0);
}

/* Runs an input: a file, surroundings, then changes. From 252 on the bytes behind are a file as it is. */
static void run_input(void) {
    const int kind = next_byte(), number = kind % N_FILES;
    const surroundings s = choose_surroundings();
    size_t n, i;
    int n_changes;
    if (kind >= 252) {
        n = n_in < FILE_BYTES ? n_in : (size_t)FILE_BYTES;
        for (i = 0; i < n; i++) file[i] = (uint8_t)next_byte();
        if (kind % 2) repair_index(file, n);
        run_load(number, &s, n);
        return;
    }
    open_file(&files[number][0]);
    n_changes = next_byte();
    n_changes = n_changes < 200 ? 1 + n_changes % 3 : n_changes % 16;
    for (; n_in && n_changes > 0; n_changes--) change_file(number);
    n = write_file();
    if (n && kind % 16 == 15 && n_in > 2) { /* the index too */
        i = n - 1 - (size_t)next_below(400);
        if (i < n) file[i] = (uint8_t)next_byte();
        repair_index(file, n);
    }
    if (n) run_load(number, &s, n);
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size) {
    make_files();
    begin_input(data, size);
    run_input();
    end_input();
    return 0;
}

#ifdef TKV_FUZZ_MAIN
static int make_random(int seed, int n_bytes, uint8_t *bytes) {
    return random_bytes(seed, 3, n_bytes, 60, bytes);
}

int main(int argc, char **argv) {
    int n_runs, i;
    const int status = run_inputs(argc, argv, "load", make_random, 60, 0, &n_runs);
    printf("%ld files loaded, %ld refused, of them %ld after all numbers were checked\n", n_loaded, n_refused,
           n_verified);
    for (i = 0; i < COUNT(refusals) && refusals[i].n; i++)
        printf("%9ld %s\n", refusals[i].n, refusals[i].text);
    for (i = 0; i < N_FILES; i++) tkv_destroy(idle[i]);
    return status;
}
#endif
