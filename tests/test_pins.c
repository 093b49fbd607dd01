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
    RUN(pinned_tokens_fill_blocks_when_memory_ends);
    RUN(wrong_arguments);
    return tkv_test_end();
}
