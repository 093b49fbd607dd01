/*
 * disk_steps.c - a program that keeps a conversation in files, for tests/test_disk.py, which makes its calls fail.
 *
 *     disk_steps save FILE N      loads FILE, then N times: appends a turn, and replaces the file (save_file.h)
 *     disk_steps journal FILE N   the same; the file grows (tkv_save_params.former)
 *     disk_steps attach FILE      reads FILE where it lies (map_file.h)
 *     disk_steps spill FILE N     appends N turns to a cache with old blocks in FILE (spill_file.h), and reads all
 *
 * It prints `has N` for the turns that it found, and `saved N` when the turns up to N are on the disk: an
 * acknowledgement. A call that failed is printed, and the program goes on with the next turn. What it loads is compared
 * with a cache that never was in a file. The status is 0; 1: the last turn was not saved; 2: wrong bytes were taken for
 * right ones, or a call failed that must not; 3: the file is damaged; 4: it cannot be read.
 */
#include "../examples/save_file.h" /* before system headers */
#include "../examples/spill_file.h"

#include "../examples/map_file.h"

enum {
    LAYERS = 2,
    HEADS = 2,
    DIM = 16,
    ROW = HEADS * DIM,
    TURN = 40,
    MOST_TURNS = 64,
    TRIES = 3,
    JOURNAL = 1 << 20
};

static float k_in[TURN * ROW], v_in[TURN * ROW];

static void fail(const char *what, const char *why) {
    printf("fault: %s: %s\n", what, why);
    exit(2);
}

static void check(tkv_status st, const char *what) {
    if (st != TKV_OK) fail(what, tkv_get_status_text(st));
}

static void say(const char *what, int turns) {
    printf("%s %d\n", what, turns);
    fflush(stdout);
}

static void say_why(const char *what, int turns) {
    printf("%s %d: %s\n", what, turns, strerror(errno));
    fflush(stdout);
}

/* >>a conversation */
static float channel_of(int token, int layer, int side, int i) {
    uint32_t x = (uint32_t)token * 2654435761u + (uint32_t)(4 * i + 2 * layer + side) * 40503u + 12345u;
    x ^= x << 13, x ^= x >> 17, x ^= x << 5;
    x *= 2246822519u;
    return (float)(x >> 16) / 16384.0f - 2.0f;
}

static void generate_turn(int turn, int layer) {
    for (int i = 0; i < TURN * ROW; i++) {
        k_in[i] = channel_of(turn * TURN + i / ROW, layer, 0, i % ROW);
        v_in[i] = channel_of(turn * TURN + i / ROW, layer, 1, i % ROW);
    }
}

static tkv_status append_turn(tkv_cache *kv, int turn) {
    tkv_status st = TKV_OK;
    for (int layer = 0; layer < LAYERS && !st; layer++) {
        generate_turn(turn, layer);
        for (int i = 0; i < TRIES && (i == 0 || st == TKV_ERR_BUDGET); i++)
            if (tkv_get_length(kv, 0, layer) == turn * TURN) st = tkv_append(kv, 0, layer, k_in, v_in, TURN);
    }
    return st;
}

static tkv_config make_config(void) {
    tkv_config cfg = tkv_default_config();
    cfg.model.n_layers = LAYERS;
    cfg.model.n_heads = cfg.model.n_kv_heads = HEADS;
    cfg.model.head_dim = DIM;
    cfg.tiers.hot_tokens = 32;
    cfg.tiers.warm_tokens = 64;
    cfg.tiers.warm.k = cfg.tiers.warm.v = TKV_KIVI4;
    cfg.tiers.archive.k = cfg.tiers.archive.v = TKV_KIVI2;
    return cfg;
}

static tkv_cache *create(const tkv_config *cfg) {
    tkv_cache *kv = NULL;
    check(tkv_create(cfg, &kv), "create");
    return kv;
}

/* Compares all tokens with those of a cache that got the same turns. Returns their number. */
static int verify(tkv_cache *kv) {
    static float k[2][MOST_TURNS * TURN * ROW], v[2][MOST_TURNS * TURN * ROW];
    const tkv_config cfg = make_config();
    const int n = tkv_get_length(kv, 0, 0), turns = n / TURN;
    tkv_cache *twin = create(&cfg);
    if (n % TURN || turns > MOST_TURNS) fail("verify", "a part of a turn");
    for (int i = 0; i < turns; i++) check(append_turn(twin, i), "append to the twin");
    for (int layer = 0; layer < LAYERS; layer++) {
        float out[2][HEADS * DIM];
        if (tkv_get_length(kv, 0, layer) != n) fail("verify", "layers of other lengths");
        generate_turn(0, layer);
        for (int i = 0; i < 2 && n; i++) {
            check(tkv_read(i ? twin : kv, 0, layer, 0, n, k[i], v[i]), "read");
            check(tkv_attend(i ? twin : kv, 0, layer, k_in, 1, out[i]), "attend");
        }
        if (n &&
            (memcmp(k[0], k[1], (size_t)(n * ROW) * sizeof(float)) || memcmp(out[0], out[1], sizeof *out) ||
             memcmp(v[0], v[1], (size_t)(n * ROW) * sizeof(float))))
            fail("verify", "other tokens");
    }
    tkv_destroy(twin);
    return turns;
}

/* Reads a file. Returns its bytes; 0 and no errno: there is none. */
static size_t read_whole(const char *path, unsigned char *bytes, size_t size) {
    FILE *f = fopen(path, "rb");
    if (!f && errno == ENOENT) return 0;
    if (!f) say_why("cannot open", 0), exit(4);
    const size_t n = fread(bytes, 1, size, f);
    const int bad = ferror(f);
    if (bad) say_why("cannot read", 0), exit(4);
    (void)fclose(f);
    if (!n) printf("an empty file\n"), exit(3);
    return n;
}

static unsigned char journal[JOURNAL];

/* Loads the file. Returns the bytes of whole saves in it. */
static size_t load(tkv_cache *kv, const char *path, int recover) {
    const size_t n = read_whole(path, journal, sizeof journal);
    tkv_load_params p;
    tkv_load_info info;
    memset(&p, 0, sizeof p);
    p.recover = recover;
    if (!n) return 0;
    const tkv_status st = tkv_seq_load(kv, &p, journal, n, &info);
    if (st == TKV_ERR_DATA) printf("damaged: %s\n", tkv_get_last_error(kv)), exit(3);
    check(st, "load");
    return info.end;
}

/* >>saving */
static int save_turns(const char *path, int n) {
    const tkv_config cfg = make_config();
    tkv_cache *kv = create(&cfg);
    tkv_save_params p;
    tkv_status st = TKV_OK;
    memset(&p, 0, sizeof p);
    (void)load(kv, path, 0);
    const int first = verify(kv);
    say("has", first);
    for (int turn = first; turn < first + n; turn++) {
        check(append_turn(kv, turn), "append");
        st = save_file_sequence(kv, &p, path, NULL);
        if (st == TKV_OK) say("saved", turn + 1);
        else if (st == TKV_ERR_IO) say_why("not saved", turn + 1);
        else check(st, "save");
    }
    tkv_destroy(kv);
    return st != TKV_OK;
}

/* Writes bytes of a journal behind its whole saves. Returns 0, or -1 with errno. */
static int extend_file(const char *path, size_t at, size_t n) {
    const int fd = open(path, O_WRONLY);
    if (fd < 0) return -1;
    int bad = ftruncate(fd, (off_t)at) != 0;
    for (size_t done = 0; done < n && !bad;) {
        const ssize_t k = pwrite(fd, journal + at + done, n - done, (off_t)(at + done));
        bad = k <= 0;
        if (!bad) done += (size_t)k;
    }
    bad = bad || fsync(fd) != 0;
    const int error = errno;
    const int bad_close = close(fd) != 0;
    if (bad) errno = error;
    return bad || bad_close ? -1 : 0;
}

static int replace_file(const char *path, size_t n) {
    save_file f;
    if (save_file_begin(&f, path) != 0) return -1;
    (void)fwrite(journal, 1, n, f.out); /* save_file_end finds errors */
    return save_file_end(&f);
}

static int extend_journal(const char *path, int n) {
    const tkv_config cfg = make_config();
    tkv_cache *kv = create(&cfg);
    int bad = 0;
    size_t end = load(kv, path, 1);
    const int first = verify(kv);
    say("has", first);
    for (int turn = first; turn < first + n; turn++) {
        tkv_save_params p;
        tkv_save_info info;
        memset(&p, 0, sizeof p);
        check(append_turn(kv, turn), "append");
        p.info = &info;
        p.former = end ? journal : NULL;
        p.former_bytes = end;
        check(tkv_seq_save(kv, &p, NULL, 0, &(size_t){0}), "size of a save");
        if (info.at == 0) p.former = NULL, p.former_bytes = 0;
        if (info.at + info.bytes > sizeof journal) fail("journal", "it is too long");
        check(tkv_seq_save(kv, &p, journal + info.at, sizeof journal - info.at, NULL), "save");
        bad = (info.at ? extend_file(path, info.at, info.bytes) : replace_file(path, info.bytes)) != 0;
        if (bad) say_why("not saved", turn + 1);
        else say("saved", turn + 1);
        if (!bad) end = info.at + info.bytes;
        else if (!info.at)
            end = 0; /* the bytes in memory are no longer those of the file: the next save begins anew */
    }
    tkv_destroy(kv);
    return bad;
}

static int attach(const char *path) {
    const tkv_config cfg = make_config();
    tkv_cache *kv = create(&cfg);
    tkv_load_params p;
    map_file *f = map_file_open(path);
    if (!f) say_why("cannot map", 0), exit(4);
    memset(&p, 0, sizeof p);
    p.attach = 1;
    p.release = map_file_release;
    p.release_user = f;
    const tkv_status st = tkv_seq_load(kv, &p, f->bytes, f->size, NULL);
    if (st == TKV_ERR_DATA) printf("damaged: %s\n", tkv_get_last_error(kv)), exit(3);
    check(st, "load");
    say("has", verify(kv));
    tkv_destroy(kv);
    return 0;
}

/* >>blocks in a file */
/* Reads a block. 1: it is right, 0: the file did not give it. */
static int read_block(tkv_cache *kv, int layer, int from, int n) {
    float k[64 * ROW], v[64 * ROW];
    tkv_status st = TKV_ERR_IO;
    for (int i = 0; i < TRIES && st == TKV_ERR_IO; i++) st = tkv_read(kv, 0, layer, from, n, k, v);
    if (st == TKV_ERR_IO) return 0;
    check(st, "read");
    for (int i = 0; i < n * ROW; i++)
        if (k[i] != channel_of(from + i / ROW, layer, 0, i % ROW) ||
            v[i] != channel_of(from + i / ROW, layer, 1, i % ROW))
            fail("spill", "other tokens");
    return 1;
}

static int spill(const char *path, int n) {
    tkv_config cfg = make_config();
    tkv_budget_info budget;
    spill_file file;
    size_t bytes;
    int turns = 0, n_refused = 0, n_blocks = 0, n_lost = 0;
    cfg.tiers.hot.k = cfg.tiers.hot.v = TKV_F32;
    cfg.budget.bytes = 200000;
    cfg.budget.pressure.max_level = TKV_OFF; /* exact blocks are offloaded */
    check(tkv_get_required_bytes(&cfg, NULL, &bytes), "bytes of a block");
    if (spill_file_open(&file, path, bytes) != 0) return say_why("cannot open", 0), 4;
    cfg.offload = spill_file_config(&file);
    tkv_cache *kv = create(&cfg);
    for (int i = 0; i < n && turns == i; i++) {
        float out[HEADS * DIM];
        const tkv_status st = append_turn(kv, turns);
        if (st == TKV_OK) turns++;
        else if (st == TKV_ERR_BUDGET) n_refused++;
        else check(st, "append");
        for (int layer = 0; layer < LAYERS && turns; layer++) {
            const tkv_status read = tkv_attend(kv, 0, layer, k_in, 1, out);
            if (read != TKV_ERR_IO) check(read, "attend");
        }
    }
    for (int layer = 0; layer < LAYERS; layer++)
        for (int from = 0, len = tkv_get_length(kv, 0, layer); from < len; from += 64) {
            n_blocks++;
            n_lost += !read_block(kv, layer, from, len - from < 64 ? len - from : 64);
        }
    check(tkv_check(kv, NULL, 0), "self-check");
    check(tkv_get_budget(kv, &budget), "budget");
    printf("offloaded %d, unwritten %d, refused %d, blocks %d, lost %d\n", (int)budget.offloaded,
           (int)budget.unwritten, n_refused, n_blocks, n_lost);
    say("has", turns);
    tkv_destroy(kv);
    spill_file_close(&file);
    return 0;
}

int main(int argc, char **argv) {
    const int n = argc > 3 ? atoi(argv[3]) : 0;
    if (argc > 2 && n <= MOST_TURNS / 2) {
        if (strcmp(argv[1], "save") == 0) return save_turns(argv[2], n);
        if (strcmp(argv[1], "journal") == 0) return extend_journal(argv[2], n);
        if (strcmp(argv[1], "attach") == 0) return attach(argv[2]);
        if (strcmp(argv[1], "spill") == 0) return spill(argv[2], n);
    }
    return printf("disk_steps save|journal|attach|spill FILE [N]\n"), 2;
}
