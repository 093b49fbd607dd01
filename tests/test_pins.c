/*
 * test_pins.c - pins that end (tkv_seq_pin). Pinned tokens stay until the end of the pin, also when their blocks
 * are merged or filled up. After that they can be evicted like others.
 */
#include "../tieredkv.h"
#include "kit.h"

enum { LAYERS = 2, DIM = 32, CHUNK = 128 };

static tkv_rng rng;

static tkv_config make_config(int keep) {
    tkv_config cfg = tkv_default_config();
    cfg.model.n_layers = LAYERS;
    cfg.model.n_heads = cfg.model.n_kv_heads = 1;
    cfg.model.head_dim = DIM;
    cfg.limits.max_append = CHUNK;
    cfg.tiers.warm = cfg.tiers.archive = pair_of(TKV_KIVI4, TKV_KIVI4);
    cfg.evict.policy = TKV_EVICT_SLIDING;
    cfg.evict.keep_tokens = keep;
    cfg.evict.batch = 1;
    cfg.host.isa = tkv_test_isa();
    return cfg;
}

static void append_tokens(tkv_cache *kv, int n) {
    static float x[CHUNK * DIM];
    int l;
    for (l = 0; l < LAYERS; l++) {
        tkv_rng_fill(&rng, x, (size_t)(n * DIM), 1.0);
        CHECK_EQ(tkv_append(kv, 0, l, x, x, n), TKV_OK);
    }
}

static void append_up_to(tkv_cache *kv, int len) {
    while (tkv_get_length(kv, 0, TKV_ALL_LAYERS) < len) append_tokens(kv, 1);
}

static int is_live(const tkv_cache *kv, int layer, int position) {
    uint64_t bit = 0;
    CHECK_EQ(live_mask_of(kv, 0, layer, position, 1, &bit), TKV_OK);
    return bit == 1;
}

static int n_live(const tkv_cache *kv, int layer, int from, int to) {
    int n = 0;
    for (; from < to; from++) n += is_live(kv, layer, from);
    return n;
}

/* A pin ends at length 400: the append to a layer of that length is the first that may evict its tokens. */
TEST(a_pin_ends) {
    tkv_config cfg = make_config(100);
    tkv_cache *kv = create_cache(&cfg);
    int l;
    append_up_to(kv, 90);
    CHECK_EQ(tkv_seq_pin(kv, 0, 20, 10, 400), TKV_OK);
    append_up_to(kv, 400);
    for (l = 0; l < LAYERS; l++) {
        CHECK_EQ(n_live(kv, l, 20, 30), 10);
        CHECK_EQ(n_live(kv, l, 4, 300), 10);
    }
    append_up_to(kv, 410);
    for (l = 0; l < LAYERS; l++) {
        CHECK_EQ(n_live(kv, l, 20, 30), 0);
        CHECK_EQ(n_live(kv, l, 0, 410), 100);
    }
    check_cache(kv);
    tkv_destroy(kv);
}

TEST(a_block_keeps_its_longest_pin) {
    tkv_config cfg = make_config(1000);
    tkv_evict_params p;
    tkv_cache *kv = create_cache(&cfg);
    memset(&p, 0, sizeof p);
    p.layer = TKV_ALL_LAYERS;
    p.keep = 50;
    append_up_to(kv, 190);
    CHECK_EQ(tkv_seq_pin(kv, 0, 10, 2, 200), TKV_OK);
    CHECK_EQ(tkv_seq_pin(kv, 0, 30, 2, 300), TKV_OK); /* the same block: both pins last until 300 */
    CHECK_EQ(tkv_seq_pin(kv, 0, 70, 2, 200), TKV_OK); /* another block */
    append_up_to(kv, 210);
    CHECK_EQ(tkv_evict(kv, &p), TKV_OK);
    CHECK_EQ(n_live(kv, 0, 10, 32), 4);
    CHECK_EQ(n_live(kv, 1, 70, 72), 0);
    append_up_to(kv, 310);
    CHECK_EQ(tkv_evict(kv, &p), TKV_OK);
    CHECK_EQ(n_live(kv, 0, 4, 80), 0);
    check_cache(kv);
    tkv_destroy(kv);
}

TEST(unlimited_pins_and_unpinning) {
    tkv_config cfg = make_config(100);
    tkv_cache *kv = create_cache(&cfg);
    append_up_to(kv, 90);
    CHECK_EQ(tkv_seq_pin(kv, 0, 10, 4, TKV_UNLIMITED), TKV_OK);
    CHECK_EQ(tkv_seq_pin(kv, 0, 70, 4, 1000), TKV_OK);
    CHECK_EQ(tkv_seq_pin(kv, 0, 71, 2, TKV_OFF), TKV_OK);
    append_up_to(kv, 700);
    CHECK_EQ(n_live(kv, 0, 4, 500), 6);
    CHECK(is_live(kv, 0, 70) && is_live(kv, 1, 73) && !is_live(kv, 0, 71));
    append_up_to(kv, 1100);
    CHECK_EQ(n_live(kv, 0, 4, 900), 4);
    CHECK_EQ(n_live(kv, 0, 10, 14), 4);
    check_cache(kv);
    tkv_destroy(kv);
}

/* A new pin in a block does not renew a pin that has ended there, even if no token was evicted in between. */
TEST(an_ended_pin_does_not_come_back) {
    tkv_config cfg = make_config(1000);
    tkv_evict_params p;
    tkv_cache *kv = create_cache(&cfg);
    append_up_to(kv, 150);
    CHECK_EQ(tkv_seq_pin(kv, 0, 10, 2, 160), TKV_OK);
    append_up_to(kv, 200);
    CHECK_EQ(tkv_seq_pin(kv, 0, 20, 2, TKV_UNLIMITED), TKV_OK);
    memset(&p, 0, sizeof p);
    p.layer = TKV_ALL_LAYERS;
    p.keep = 50;
    CHECK_EQ(tkv_evict(kv, &p), TKV_OK);
    CHECK_EQ(n_live(kv, 0, 10, 12), 0);
    CHECK_EQ(n_live(kv, 0, 20, 22), 2);
    check_cache(kv);
    tkv_destroy(kv);
}

/* A pin is of a token, not of its slot. Tokens that come into the slots of pinned ones, after a cut or because a path is
 * kept, are not pinned. A pinned token that is kept stays pinned in its new slot. */
TEST(slots_of_pinned_tokens_are_not_pinned) {
    enum { CUT, REMOVED, KEPT, WAYS };
    int way, until, i, l;
    for (way = 0; way < WAYS; way++)
        for (until = TKV_UNLIMITED; until <= 5000; until += 5000 - TKV_UNLIMITED) {
            tkv_config cfg = make_config(4000);
            tkv_cache *kv;
            tkv_evict_params p;
            int kept[20];
            cfg.model.rope.dim = DIM;
            kv = create_cache(&cfg);
            append_tokens(kv, 100);
            CHECK_EQ(tkv_seq_pin(kv, 0, 60, 30, until), TKV_OK);
            for (i = 0; i < COUNT(kept); i++) kept[i] = 80 + i; /* 10 of them are pinned */
            if (way == CUT) CHECK_EQ(tkv_seq_truncate(kv, 0, 50), TKV_OK);
            if (way == REMOVED) CHECK_EQ(tkv_seq_remove(kv, 0, 50, TKV_UNLIMITED), TKV_OK);
            if (way == KEPT) CHECK_EQ(tkv_seq_keep(kv, 0, 50, kept, COUNT(kept)), TKV_OK);
            CHECK_EQ(tkv_get_length(kv, 0, TKV_ALL_LAYERS), way == KEPT ? 70 : 50);
            append_tokens(kv, 5); /* some into the same block, then whole blocks */
            for (i = 0; i < 3; i++) append_tokens(kv, CHUNK);
            memset(&p, 0, sizeof p);
            p.layer = TKV_ALL_LAYERS;
            p.keep = 50;
            CHECK_EQ(tkv_evict(kv, &p), TKV_OK);
            for (l = 0; l < LAYERS; l++) {
                CHECK_EQ(n_live(kv, l, 4, 50) + n_live(kv, l, 60, 200), 0);
                if (way != KEPT) CHECK_EQ(n_live(kv, l, 50, 60), 0);
                else if (until == TKV_UNLIMITED) CHECK_EQ(n_live(kv, l, 50, 60), 10);
            }
            check_cache(kv);
            tkv_destroy(kv);
        }
}

/* Eviction leaves holes, and blocks are merged. Tokens keep their pins. Pins that have ended do not come back. */
TEST(merged_blocks_keep_pins) {
    tkv_config cfg = make_config(4000);
    tkv_cache *kv = create_cache(&cfg);
    uint64_t victims[10];
    tkv_evict_params p;
    int i;
    for (i = 0; i < 5; i++) append_tokens(kv, CHUNK);
    CHECK_EQ(tkv_seq_pin(kv, 0, 80, 2, 650), TKV_OK); /* ends before the blocks are merged */
    CHECK_EQ(tkv_seq_pin(kv, 0, 140, 2, 900), TKV_OK);
    append_up_to(kv, 660);
    memset(victims, 0xff, sizeof victims);
    for (i = 4; i < 400; i++)
        if (i % 20 == 0 || i % 20 == 1) victims[i / 64] &= ~((uint64_t)1 << i % 64);
    CHECK_EQ(evict_tokens(kv, 0, TKV_ALL_LAYERS, victims, 400), TKV_OK);
    CHECK_EQ(n_live(kv, 0, 4, 400), 38);
    memset(&p, 0, sizeof p);
    p.layer = TKV_ALL_LAYERS;
    p.keep = 100;
    CHECK_EQ(tkv_evict(kv, &p), TKV_OK);
    CHECK_EQ(n_live(kv, 0, 4, 400), 2);
    CHECK_EQ(n_live(kv, 1, 140, 142), 2);
    append_up_to(kv, 910);
    CHECK_EQ(tkv_evict(kv, &p), TKV_OK);
    CHECK_EQ(n_live(kv, 0, 4, 400), 0);
    check_cache(kv);
    tkv_destroy(kv);
}

/* Evicts all tokens that no pin keeps, and checks that those of [first, end) pairs stay, in all layers. */
static void check_pinned(tkv_cache *kv, int seq, const int *ranges, int n_ranges, const char *what) {
    uint64_t all[32];
    const int len = tkv_get_length(kv, seq, TKV_ALL_LAYERS);
    int l, t, r;
    memset(all, 0xff, sizeof all);
    CHECK_EQ(evict_tokens(kv, seq, TKV_ALL_LAYERS, all, len), TKV_OK);
    for (l = 0; l < LAYERS; l++)
        for (t = 0; t < len; t++) {
            uint64_t bit = 0;
            int wanted = 0;
            for (r = 0; r < n_ranges; r++) wanted |= t >= ranges[2 * r] && t < ranges[2 * r + 1];
            CHECK_EQ(live_mask_of(kv, seq, l, t, 1, &bit), TKV_OK);
            CHECK_MSG((int)bit == wanted, "%s: layer %d, token %d", what, l, t);
        }
    check_cache(kv);
}

static tkv_cache *make_moving_cache(void) {
    tkv_config cfg = make_config(0);
    cfg.evict.sink_tokens = TKV_OFF;
    cfg.model.rope.dim = TKV_OFF;
    cfg.tiers.hot_tokens = 1024;
    cfg.tiers.hot = cfg.tiers.warm = cfg.tiers.archive = pair_of(TKV_F32, TKV_F32);
    cfg.limits.max_tokens = 600;
    cfg.limits.max_seqs = 2;
    return create_cache(&cfg);
}

/* Tokens of two blocks come into one: all kept tokens keep their pins. A pin that had ended does not come back. */
TEST(kept_tokens_keep_pins_with_an_end) {
    static const int pinned[] = {60, 66};
    int indices[64], n, length;
    for (length = 0; length < 2; length++) {
        tkv_cache *kv = make_moving_cache();
        append_tokens(kv, 108);
        CHECK_EQ(tkv_seq_pin(kv, 0, 70, 6, 200), TKV_OK);
        CHECK_EQ(tkv_seq_pin(kv, 0, 55, 6, 109), TKV_OK); /* is over soon */
        append_tokens(kv, 1);
        for (n = 0; n < 46; n++) indices[n] = 50 + n;
        CHECK_EQ(tkv_seq_keep(kv, 0, 40, indices, n), TKV_OK);
        CHECK_EQ(tkv_get_length(kv, 0, 0), 86);
        append_up_to(kv, length ? 200 : 199);
        check_pinned(kv, 0, pinned, !length, "kept");
        tkv_destroy(kv);
    }
}

/* A block whose last tokens alone are left takes those of the next one, behind which a whole block is gone: in idle
 * time, and by an eviction. The tokens come into other slots, with their pins. */
TEST(parts_of_blocks_merge_with_their_pins) {
    static const int pinned[] = {61, 66, 70, 72};
    uint64_t first = ~(uint64_t)0 << 4;
    int is_evicted, done;
    for (is_evicted = 0; is_evicted < 2; is_evicted++) {
        tkv_cache *kv = make_moving_cache();
        while (tkv_get_length(kv, 0, 0) < 300) append_tokens(kv, 60);
        CHECK_EQ(tkv_seq_pin(kv, 0, 61, 5, 500), TKV_OK);
        CHECK_EQ(tkv_seq_pin(kv, 0, 70, 2, 500), TKV_OK);
        CHECK_EQ(tkv_seq_remove(kv, 0, 78, 200), TKV_OK);
        if (is_evicted) CHECK_EQ(evict_tokens(kv, 0, TKV_ALL_LAYERS, &first, 60), TKV_OK);
        else CHECK_EQ(tkv_seq_remove(kv, 0, 4, 60), TKV_OK);
        CHECK_EQ(tkv_maintain(kv, 100, NULL, NULL, &done), TKV_OK);
        CHECK(done > 0 || is_evicted);
        check_pinned(kv, 0, pinned, 2, is_evicted ? "merged by an eviction" : "merged in idle time");
        append_up_to(kv, 500);
        check_pinned(kv, 0, NULL, 0, "length 500");
        tkv_destroy(kv);
    }
}

/* Pins that have ended stay ended: where blocks are split and joined again, where short blocks are merged, and after
 * cuts, in the sequence, in forks and in saved parts. An aborted step ends none. */
TEST(ended_pins_stay_ended) {
    static const int later[] = {40, 46}, merged[] = {70, 76}, early[] = {4, 11};
    static uint8_t file[1 << 20];
    tkv_save_params save;
    tkv_load_params load;
    size_t size;
    int kind, done;
    for (kind = 0; kind < 6; kind++) {
        tkv_cache *kv = make_moving_cache();
        append_tokens(kv, 70);
        CHECK_EQ(tkv_seq_pin(kv, 0, 4, 7, 100), TKV_OK);
        if (kind == 4) append_up_to(kv, 90);
        if (kind == 4) CHECK_EQ(tkv_seq_begin(kv, 0), TKV_OK);
        append_up_to(kv, kind == 4 ? 120 : 200);
        if (kind == 0) {
            CHECK_EQ(tkv_seq_shift(kv, 0, 32, TKV_UNLIMITED, 5), TKV_OK);
            CHECK_EQ(tkv_seq_pin(kv, 0, 40, 6, 500), TKV_OK);
            CHECK_EQ(tkv_seq_shift(kv, 0, 37, TKV_UNLIMITED, -5), TKV_OK);
            check_pinned(kv, 0, later, 1, "shifted there and back");
        } else if (kind == 1) {
            append_up_to(kv, 300);
            CHECK_EQ(tkv_seq_pin(kv, 0, 70, 6, 500), TKV_OK);
            CHECK_EQ(tkv_seq_remove(kv, 0, 20, 68), TKV_OK);
            CHECK_EQ(tkv_seq_remove(kv, 0, 80, 132), TKV_OK);
            CHECK_EQ(tkv_maintain(kv, 100, NULL, NULL, &done), TKV_OK);
            CHECK(done > 0);
            check_pinned(kv, 0, merged, 1, "merged in idle time");
        } else if (kind == 2) {
            CHECK_EQ(tkv_seq_truncate(kv, 0, 90), TKV_OK);
            check_pinned(kv, 0, NULL, 0, "cut");
        } else if (kind == 3) {
            CHECK_EQ(tkv_seq_fork(kv, 0, 1, 90), TKV_OK);
            check_pinned(kv, 1, NULL, 0, "fork");
        } else if (kind == 4) {
            CHECK_EQ(tkv_seq_abort(kv, 0), TKV_OK);
            append_up_to(kv, 99);
            check_pinned(kv, 0, early, 1, "aborted");
        } else {
            memset(&save, 0, sizeof save);
            memset(&load, 0, sizeof load);
            save.length = 90;
            load.seq = 1;
            CHECK_EQ(tkv_seq_save(kv, &save, file, sizeof file, &size), TKV_OK);
            CHECK_EQ(tkv_seq_load(kv, &load, file, size, NULL), TKV_OK);
            check_pinned(kv, 1, NULL, 0, "loaded");
        }
        tkv_destroy(kv);
    }
}

/* An end that belongs to no token any more does not count for the pins that come later. */
TEST(ends_of_gone_tokens_do_not_count) {
    uint64_t victims = (uint64_t)3 << 10;
    int kind;
    for (kind = 0; kind < 3; kind++) {
        tkv_cache *kv = make_moving_cache();
        append_tokens(kv, 100);
        if (kind == 0) { /* they are gone already */
            CHECK_EQ(evict_tokens(kv, 0, TKV_ALL_LAYERS, &victims, 64), TKV_OK);
            CHECK_EQ(tkv_seq_pin(kv, 0, 10, 2, 500), TKV_OK);
        } else if (kind == 1) { /* they are removed */
            CHECK_EQ(tkv_seq_pin(kv, 0, 10, 2, 500), TKV_OK);
            CHECK_EQ(tkv_seq_remove(kv, 0, 10, 12), TKV_OK);
        } else { /* they lose the pin */
            CHECK_EQ(tkv_seq_pin(kv, 0, 10, 2, 500), TKV_OK);
            CHECK_EQ(tkv_seq_pin(kv, 0, 10, 2, TKV_OFF), TKV_OK);
        }
        CHECK_EQ(tkv_seq_pin(kv, 0, 20, 2, 110), TKV_OK);
        CHECK_EQ(tkv_seq_shift(kv, 0, 15, TKV_UNLIMITED, 5), TKV_OK);
        CHECK_EQ(tkv_seq_shift(kv, 0, 15, TKV_UNLIMITED, -5), TKV_OK);
        append_up_to(kv, 110);
        check_pinned(kv, 0, NULL, 0, "length 110");
        tkv_destroy(kv);
    }
}

/* A slide lowers the ends of all pins of the sequence as it lowers its length, of sinks too. */
TEST(slides_lower_the_ends_of_pins) {
    static const int pinned[] = {0, 4, 336, 346};
    int more, n_removed;
    for (more = 0; more < 2; more++) {
        tkv_cache *kv = make_moving_cache();
        while (tkv_get_length(kv, 0, 0) < 590) append_tokens(kv, 59);
        CHECK_EQ(tkv_seq_pin(kv, 0, 0, 4, 595), TKV_OK);
        CHECK_EQ(tkv_seq_pin(kv, 0, 400, 10, 595), TKV_OK);
        CHECK_EQ(tkv_seq_slide(kv, 0, 64, &n_removed), TKV_OK);
        CHECK_EQ(n_removed, 64);
        append_up_to(kv, more ? 531 : 530);
        check_pinned(kv, 0, pinned, more ? 0 : 2, "slid");
        tkv_destroy(kv);
    }
}

/* Each chunk pins 40 of its 64 tokens, until the budget has no room. When no token is left to evict, coded blocks are
 * filled up: then 40 pinned tokens do not keep a block of their own. */
TEST(pinned_tokens_fill_blocks_when_memory_ends) {
    enum { PINNED = 40, MOST = 40 };
    static float x[LAYERS][MOST * TKV_BLOCK_TOKENS * DIM], read[MOST * TKV_BLOCK_TOKENS * DIM];
    tkv_config cfg = make_config(0);
    tkv_layer_info info;
    tkv_status st = TKV_OK;
    tkv_cache *kv;
    int l, i, n = 0, n_blocks;
    cfg.budget.bytes = 150000;
    kv = create_cache(&cfg);
    for (; n < MOST * TKV_BLOCK_TOKENS && !st; n += TKV_BLOCK_TOKENS) {
        for (l = 0; l < LAYERS && !st; l++) {
            float *at = x[l] + n * DIM;
            tkv_rng_fill(&rng, at, TKV_BLOCK_TOKENS * DIM, 1.0);
            st = tkv_append(kv, 0, l, at, at, TKV_BLOCK_TOKENS);
        }
        if (st) break;
        CHECK_EQ(tkv_seq_pin(kv, 0, n, PINNED, TKV_UNLIMITED), TKV_OK);
        check_cache(kv);
    }
    CHECK_EQ(st, TKV_ERR_BUDGET);
    CHECK(n >= 12 * TKV_BLOCK_TOKENS);
    CHECK_LE(budget_of(kv).peak, cfg.budget.bytes);
    CHECK_EQ(tkv_get_layer(kv, 0, 0, &info), TKV_OK);
    CHECK(info.evicted > n / 4);
    n_blocks = info.blocks[TKV_TIER_HOT] + info.blocks[TKV_TIER_WARM] + info.blocks[TKV_TIER_ARCHIVE];
    CHECK_LE(n_blocks * 50, n - info.evicted); /* sinks and the newest tokens included */
    for (i = 0; i < n; i += TKV_BLOCK_TOKENS) {
        CHECK_EQ(n_live(kv, 0, i, i + PINNED), PINNED);
        CHECK_EQ(tkv_read(kv, 0, 0, i, PINNED, read + i * DIM, NULL), TKV_OK);
        CHECK_LE(float_difference(read + i * DIM, x[0] + i * DIM, PINNED * DIM),
                 .8); /* two bits; other tokens: 1.4 */
    }
    tkv_destroy(kv);
}

TEST(wrong_arguments) {
    tkv_config cfg = make_config(100);
    tkv_cache *kv = create_cache(&cfg);
    append_up_to(kv, 90);
    CHECK_EQ(tkv_seq_pin(NULL, 0, 0, 1, 10), TKV_ERR_ARG);
    CHECK_EQ(tkv_seq_pin(kv, 0, 0, 1, 0), TKV_ERR_ARG);
    CHECK_MSG(strstr(tkv_get_last_error(kv), "length") != NULL, "%s", tkv_get_last_error(kv));
    CHECK_EQ(tkv_seq_pin(kv, 0, 0, 1, -5), TKV_ERR_ARG);
    CHECK_EQ(tkv_seq_pin(kv, 0, 0, 1, 0x7fffffff), TKV_ERR_ARG);
    CHECK_EQ(tkv_seq_pin(kv, 0, -1, 1, 10), TKV_ERR_ARG);
    CHECK_EQ(tkv_seq_pin(kv, 0, 5, -1, 10), TKV_ERR_ARG);
    CHECK_EQ(tkv_seq_pin(kv, 1, 0, 1, 10), TKV_ERR_ARG);
    CHECK_EQ(tkv_seq_pin(kv, 0, 10, 5, 20), TKV_OK); /* has ended already: no effect */
    append_up_to(kv, 300);
    CHECK_EQ(n_live(kv, 0, 4, 100), 0);
    memset(&cfg.evict, 0, sizeof cfg.evict);
    tkv_destroy(kv);
    kv = create_cache(&cfg);
    CHECK_EQ(tkv_seq_pin(kv, 0, 0, 1, 10), TKV_ERR_STATE);
    tkv_destroy(kv);
}

int main(int argc, char **argv) {
    tkv_test_begin(argc, argv);
    rng = tkv_rng_seed(1);
    RUN(a_pin_ends);
    RUN(a_block_keeps_its_longest_pin);
    RUN(unlimited_pins_and_unpinning);
    RUN(an_ended_pin_does_not_come_back);
    RUN(slots_of_pinned_tokens_are_not_pinned);
    RUN(merged_blocks_keep_pins);
    RUN(kept_tokens_keep_pins_with_an_end);
    RUN(parts_of_blocks_merge_with_their_pins);
    RUN(ended_pins_stay_ended);
    RUN(ends_of_gone_tokens_do_not_count);
    RUN(slides_lower_the_ends_of_pins);
    RUN(pinned_tokens_fill_blocks_when_memory_ends);
    RUN(wrong_arguments);
    return tkv_test_end();
}
