/*
 * texts.c - a fuzz target: the bytes of an input change a valid text, and the library reads it. The texts are configs
 * as lines, TOML and JSON, threshold stores, names, and labels of a report.
 *
 * Changes are bytes, pieces of a small grammar, whole lines, and ranges that are deleted, repeated or moved. The sum of
 * a threshold store is repaired in most inputs.
 *   - A text that is read and printed, in any form, is read again and prints the same.
 *   - A text that is refused changes no byte of the caller's, and there is a sentence that names its line.
 *   - tkv_create_ex takes the texts that tkv_parse_config and tkv_validate_config take, and frees all of a cache.
 *   - A name that is found is one of the value; a line of a report is a comment or a metric, whatever the labels are.
 *   - Texts and sentences fill exactly the bytes that the call asks for.
 *
 * Coverage-guided, with clang: make fuzz TARGET=texts
 * As a plain program, with any compiler, for random inputs or for files of inputs:
 *     cc -O2 -DTKV_FUZZ_MAIN -include assert.h -DTKV_ASSERT=assert tests/fuzz/texts.c examples/tieredkv.c -o texts -lm
 *     ./texts --runs 1000000 [--seed 1] [--bytes 40]
 */
#include "../config_texts.h"
#include "target.h"

enum {
    LAYERS = 8,
    TEXT = 1 << 14,
    PRINTED = 1 << 17,
    FREQUENCIES = 600,
    REASON = 200,
    ENTRIES = 6,
    HELD = 1 << 24
};

static long n_read, n_created, n_refused;

/* >>changes of a text */
static char text[TEXT];
static size_t n_text;

static const char *const pieces[] = {"[",
                                     "]",
                                     "[0-4095]",
                                     ".",
                                     "=",
                                     " = ",
                                     ":",
                                     ",",
                                     "\"",
                                     "{",
                                     "}",
                                     "\n",
                                     "#",
                                     "none",
                                     "all",
                                     "a30/r20",
                                     "1",
                                     "-1",
                                     "1e5",
                                     "4096",
                                     "preset = ",
                                     "adr",
                                     "+",
                                     "clip",
                                     "0",
                                     "99999999",
                                     "\r\n",
                                     "off",
                                     "unlimited",
                                     "zero",
                                     "[[layers]]\n",
                                     "[[",
                                     "]]",
                                     "]\n[",
                                     "[layers.0-2]\n",
                                     "0-2",
                                     "null",
                                     "{\"",
                                     "\": {",
                                     "\": [{",
                                     "'",
                                     "= {",
                                     "_",
                                     ", ",
                                     "\\",
                                     "\t",
                                     "1.5G",
                                     "512K",
                                     "false",
                                     "true",
                                     "2147483648",
                                     "18446744073709551616",
                                     "1e999",
                                     "0.1",
                                     "default",
                                     "kivi2",
                                     "-",
                                     "layers[7].rope.frequencies = 1\n",
                                     "budget.n_levels = 8\n",
                                     "budget.ladder[7].from_tokens = 9\n",
                                     "\xff",
                                     " "};

static const char *const keys[] = {"model.n_layers",
                                   "model.n_heads",
                                   "model.n_kv_heads",
                                   "model.head_dim",
                                   "model.v_head_dim",
                                   "model.v_in_k",
                                   "model.scale",
                                   "model.window",
                                   "model.window_sinks",
                                   "model.rope.dim",
                                   "model.rope.interleaved",
                                   "model.rope.base",
                                   "model.rope.scale",
                                   "model.rope.kind",
                                   "model.rope.first",
                                   "model.rope.frequencies",
                                   "limits.max_seqs",
                                   "limits.max_tokens",
                                   "limits.max_append",
                                   "limits.max_states",
                                   "limits.state_bytes",
                                   "tiers.hot",
                                   "tiers.warm",
                                   "tiers.archive",
                                   "tiers.sink_tokens",
                                   "tiers.hot_tokens",
                                   "tiers.warm_tokens",
                                   "tiers.n_anchors",
                                   "format.group_size",
                                   "format.fit",
                                   "format.rotate",
                                   "format.kvquant",
                                   "format.k_scales",
                                   "format.subspaces",
                                   "format.int_bits",
                                   "budget.bytes",
                                   "budget.n_levels",
                                   "budget.adapt",
                                   "budget.discard",
                                   "budget.ladder[0].archive",
                                   "budget.ladder[1].hot_tokens",
                                   "budget.pressure.threshold",
                                   "budget.pressure.profile",
                                   "meter.heads",
                                   "meter.target",
                                   "evict.policy",
                                   "evict.keep_tokens",
                                   "importance.strategy",
                                   "importance.sample_every",
                                   "promotion.every",
                                   "host.isa",
                                   "host.nonfinite",
                                   "layers[0].hot",
                                   "layers[1-4].window",
                                   "layers[5].head_dim",
                                   "layers[2].share_kv",
                                   "layers[3].no_cache",
                                   "layers[4].rope.dim",
                                   "preset",
                                   "layers",
                                   "model",
                                   "budget.ladder"};

static void replace_range(size_t at, size_t n, const char *with, size_t n_with) {
    static char held[TEXT];
    if (at > n_text) at = n_text;
    if (n > n_text - at) n = n_text - at;
    if (n_with > TEXT / 2 || n_text - n + n_with > TEXT - 64) return;
    memcpy(held, with, n_with);
    memmove(text + at + n_with, text + at + n, n_text - at - n);
    memcpy(text + at, held, n_with);
    n_text = n_text - n + n_with;
}

static size_t choose_place(void) { return (size_t)next_below((int)n_text + 1); }

/* The length of a run of digits at a place. */
static size_t n_digits(size_t at) {
    size_t n = 0;
    while (at + n < n_text && text[at + n] >= '0' && text[at + n] <= '9') n++;
    return n;
}

static void change_text(void) {
    const int how = next_byte() % 16;
    size_t at = choose_place(), n;
    char line[100];
    const char *piece = pieces[next_byte() % COUNT(pieces)];
    if (how < 3 && at < n_text) {
        text[at] = (char)next_byte();
    } else if (how < 6) {
        replace_range(at, 0, piece, strlen(piece));
    } else if (how < 8) { /* the next number */
        while (at < n_text && !n_digits(at)) at++;
        replace_range(at, n_digits(at), piece, strlen(piece));
    } else if (how < 11) { /* a line of its own */
        n = (size_t)snprintf(line, sizeof line, "%s = %s\n", keys[next_byte() % COUNT(keys)], piece);
        while (at < n_text && at && text[at - 1] != '\n') at++;
        replace_range(at, 0, line, n);
    } else if (how == 11) {
        replace_range(at, 0, text, (size_t)next_byte() < n_text ? (size_t)next_byte() % 64 : 0);
    } else if (how == 12) {
        n = choose_place();
        replace_range(at, 0, text + n, n_text - n < 24 ? n_text - n : 24);
    } else if (how == 13) {
        n_text = at;
    } else {
        replace_range(at, 1 + (size_t)next_byte() % 24, "", 0);
    }
}

/* Begins with a text, and makes a few changes. */
static void make_text(const char *from) {
    int i;
    n_text = strlen(from);
    memcpy(text, from, n_text);
    for (i = next_byte() % 5; i > 0 && n_in; i--) change_text();
}

/* A copy in memory of exactly its size, so that sanitizers see the first byte behind it. */
static char *copy_of(const char *from, size_t n) {
    char *copy = (char *)malloc(n ? n : 1);
    if (!copy) exit(2);
    memcpy(copy, from, n);
    return copy;
}

/* Checks a text that a call has written: `needed` bytes, a final zero, nothing behind. */
static void check_written(const char *buf, size_t needed, size_t size) {
    CHECK(needed > 0 && needed <= size && strlen(buf) + 1 == needed);
    CHECK_EQ(buf[needed], '#');
}

/* >>configs */
typedef struct arrays {
    tkv_layer_config layers[LAYERS];
    tkv_level levels[TKV_MAX_LEVELS];
    float frequencies[FREQUENCIES];
} arrays;

static arrays first, second, before;

static tkv_config_arrays room_of(arrays *a) {
    tkv_config_arrays room;
    memset(a, 0x5a, sizeof *a);
    room.layers = a->layers;
    room.n_layers = LAYERS;
    room.ladder = a->levels;
    room.n_levels = TKV_MAX_LEVELS;
    room.frequencies = a->frequencies;
    room.n_frequencies = FREQUENCIES;
    return room;
}

static tkv_status parse(tkv_config *cfg, const tkv_config_arrays *room, const char *from, size_t n,
                        char *reason, size_t size) {
    char *copy = copy_of(from, n);
    const tkv_status st = tkv_parse_config(cfg, room, copy, n, reason, size);
    free(copy);
    return st;
}

/* Prints a config, reads that, and prints it again. */
static void print_again(const tkv_config *cfg, int style) {
    static char printed[PRINTED], again[PRINTED];
    const tkv_config_arrays room = room_of(&second);
    tkv_config back = tkv_default_config();
    char reason[REASON];
    size_t needed = 0, n = 0;
    tkv_status st = tkv_print_config(cfg, style, NULL, 0, &needed);
    CHECK_MSG(st == TKV_OK, "a config that was read has no text: %d", (int)st);
    if (st || needed >= PRINTED) return;
    memset(printed, '#', needed + 1);
    CHECK_EQ(tkv_print_config(cfg, style, printed, needed - 1, NULL), TKV_ERR_CAPACITY);
    CHECK_EQ(printed[0], '#');
    CHECK_EQ(tkv_print_config(cfg, style, printed, needed, NULL), TKV_OK);
    check_written(printed, needed, PRINTED);
    st = parse(&back, &room, printed, needed - 1, reason, sizeof reason);
    CHECK_MSG(st == TKV_OK, "%s, of:\n%s", reason, printed);
    if (st) return;
    CHECK_EQ(tkv_print_config(&back, style, again, sizeof again, &n), TKV_OK);
    CHECK_STR(again, printed);
}

/* The heap of a cache: refuses more than HELD bytes. */
static counting_allocator memory;

static void *take(void *user, size_t size, size_t align) {
    return size > HELD - memory.held ? NULL : counting_alloc(user, size, align);
}

static void create_from_text(const tkv_config *parsed, tkv_status read) {
    tkv_config cfg = tkv_default_config();
    char reason[REASON];
    tkv_cache *kv = NULL;
    const tkv_status valid = read ? read : tkv_validate_config(parsed, NULL, 0);
    tkv_status st;
    char *copy = copy_of(text, n_text);
    cfg.host.allocator = counting_allocator_of(&memory);
    cfg.host.allocator.alloc = take;
    memset(reason, '#', sizeof reason);
    st = tkv_create_ex(&cfg, copy, n_text, &kv, reason, sizeof reason);
    free(copy);
    if (read) CHECK(strncmp(reason, "line ", 5) == 0); /* which line: it looks at model.n_layers first */
    if (valid) CHECK_EQ(st, valid);
    CHECK(st == TKV_OK || st == TKV_ERR_CONFIG || st == TKV_ERR_BUDGET || st == TKV_ERR_NOMEM ||
          st == TKV_ERR_ISA);
    CHECK((st == TKV_OK) == (reason[0] == 0));
    CHECK((st == TKV_OK) == (kv != NULL));
    if (kv) check_cache(kv), n_created++;
    tkv_destroy(kv);
    CHECK_EQ(memory.held, 0);
}

static void run_config(void) {
    const char *const others[] = {sample,
                                  sample_json,
                                  pressure_sample,
                                  spellings[0],
                                  spellings[1],
                                  spellings[2],
                                  spellings[3],
                                  spellings[4],
                                  spellings[5],
                                  "preset = adr\n",
                                  "{\"preset\": \"by-context\", \"limits.max_tokens\": 9000}",
                                  ""};
    const int how = next_byte();
    tkv_config cfg = tkv_default_config(), same = cfg;
    tkv_config_arrays room = room_of(&first);
    char reason[REASON], shorter[REASON];
    const size_t size = how % 8 ? sizeof reason : (size_t)(1 + how / 8);
    tkv_status st;
    make_text(others[next_byte() % COUNT(others)]);
    if (how % 16 == 1) room.n_layers = how / 32, room.n_levels = how / 64, room.n_frequencies = how / 16;
    memcpy(&before, &first, sizeof first);
    memset(reason, '#', sizeof reason);
    st = parse(&cfg, how % 32 == 3 ? NULL : &room, text, n_text, reason, sizeof reason);
    CHECK((st == TKV_OK) == (reason[0] == 0));
    if (st) {
        CHECK_EQ(st, TKV_ERR_CONFIG);
        CHECK_MSG(strncmp(reason, "line ", 5) == 0 && strlen(reason) < sizeof reason, "%s", reason);
        CHECK_MEM(&cfg, &same, sizeof cfg);
        CHECK_MEM(&first, &before, sizeof first);
        n_refused++;
        memset(shorter, '#', sizeof shorter);
        if (how % 8 == 0 || how / 8 % 8 == 0) { /* the same, or a shorter sentence */
            CHECK_EQ(parse(&same, how % 32 == 3 ? NULL : &room, text, n_text, shorter, size), st);
            CHECK(strlen(shorter) < size && strncmp(shorter, reason, strlen(shorter)) == 0);
            if (size < sizeof shorter) CHECK_EQ(shorter[size], '#');
        }
    } else {
        print_again(&cfg, how % TKV_TEXT_COUNT);
        n_read++;
    }
    if (st && strstr(reason, "room for ")) return; /* tkv_create_ex has room for all layers */
    if (how / 16 % 4 == 0) create_from_text(&cfg, st);
}

/* >>threshold stores */
static const char thresholds[] = "tieredkv-thresholds 1\n"
                                 "all 4096 64 448 128 a30 r30 0.981200 SmolLM2-135M\n"
                                 "all 8192 none all 0 default default 1.000000 SmolLM2-135M\n"
                                 "3 512 0 1 2147483647 kivi2 kvquant2 0.000001 a model with blanks\n";

static void run_thresholds(void) {
    const int how = next_byte();
    tkv_threshold entries[ENTRIES], was[ENTRIES];
    tkv_thresholds t;
    char reason[REASON], *copy, *again;
    size_t needed = 0;
    tkv_status st;
    make_text(thresholds);
    if (how % 8)
        n_text += (size_t)snprintf(text + n_text, 40, "sum %016llx\n",
                                   (unsigned long long)hash_of(HASH_START, (const uint8_t *)text, n_text));
    memset(entries, 0x5a, sizeof entries);
    memcpy(was, entries, sizeof was);
    t.entry = entries;
    t.n = 0;
    t.capacity = how / 8 % 4 ? ENTRIES : how / 32;
    if (t.capacity > ENTRIES) t.capacity = ENTRIES;
    copy = copy_of(text, n_text);
    st = tkv_parse_thresholds(&t, copy, n_text, reason, sizeof reason);
    free(copy);
    if (st) {
        const char *begins = st == TKV_ERR_CAPACITY ? "the text has " : "line ";
        CHECK(st == TKV_ERR_DATA || st == TKV_ERR_CAPACITY);
        CHECK_MSG(strncmp(reason, begins, strlen(begins)) == 0 && t.n == 0, "%s", reason);
        CHECK_MEM(entries, was, sizeof was);
        n_refused++;
        return;
    }
    CHECK_EQ(tkv_print_thresholds(&t, NULL, 0, &needed), TKV_OK);
    again = (char *)malloc(needed + 1);
    if (!again) exit(2);
    memset(again, '#', needed + 1);
    CHECK_EQ(tkv_print_thresholds(&t, again, needed - 1, NULL), TKV_ERR_CAPACITY);
    CHECK_EQ(tkv_print_thresholds(&t, again, needed, NULL), TKV_OK);
    check_written(again, needed, needed);
    CHECK(needed == n_text + 1 && memcmp(again, text, n_text) == 0); /* there is one text of a store */
    free(again);
    n_read++;
}

/* >>names and labels */
static void run_find(void) {
    const int kind = next_byte() % (TKV_NAME_COUNT + 1) - (next_byte() == 255), from = next_byte() % 40;
    const char *known = tkv_get_name((tkv_name_kind)kind, from);
    int value = 12345, again = 0;
    char *copy;
    make_text(known ? known : next_byte() % 2 ? "fp16" : "");
    text[n_text] = 0;
    copy = copy_of(text, n_text + 1);
    if (tkv_find_name((tkv_name_kind)kind, copy, &value) == TKV_OK) {
        known = tkv_get_name((tkv_name_kind)kind, value);
        CHECK(known != NULL);
        if (known) CHECK_EQ(tkv_find_name((tkv_name_kind)kind, known, &again), TKV_OK);
        CHECK_EQ(again, value);
        n_read++;
    } else {
        CHECK_EQ(value, 12345);
        n_refused++;
    }
    free(copy);
}

static void run_labels(void) {
    static tkv_cache *kv;
    static char printed[PRINTED];
    tkv_config cfg = make_sized_config(2, 2, 1, 8, 2, 16);
    const char *line;
    char *copy;
    size_t needed = 0;
    tkv_status st;
    if (!kv) kv = create_cache(&cfg);
    make_text(next_byte() % 2 ? "model=a b,host=x\\,y" : "a_1=");
    text[n_text] = 0;
    copy = copy_of(text, strlen(text) + 1);
    st = tkv_print_report(kv, TKV_REPORT_PROMETHEUS, copy, printed, sizeof printed, &needed);
    CHECK(st == TKV_OK || st == TKV_ERR_ARG);
    for (line = printed; !st && *line; line++) {
        CHECK(strncmp(line, "# ", 2) == 0 || strncmp(line, "tkv_", 4) == 0);
        line = strchr(line, '\n');
        CHECK(line != NULL);
        if (!line) break;
    }
    if (!st) CHECK_EQ(strlen(printed) + 1, needed);
    free(copy);
}

static void run_input(void) {
    const int what = next_byte() % 16;
    if (what < 11) run_config();
    else if (what < 14) run_thresholds();
    else if (what == 14) run_find();
    else run_labels();
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size) {
    begin_input(data, size);
    run_input();
    end_input();
    return 0;
}

#ifdef TKV_FUZZ_MAIN
static int make_random(int seed, int n_bytes, uint8_t *bytes) {
    return random_bytes(seed, 4, n_bytes, 40, bytes);
}

int main(int argc, char **argv) {
    int n_runs;
    const int status = run_inputs(argc, argv, "texts", make_random, 40, 0, &n_runs);
    printf("%ld texts read, %ld refused, %ld caches created\n", n_read, n_refused, n_created);
    return status;
}
#endif
