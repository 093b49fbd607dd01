/*
 * white_cache.c - white-box test of src/cache: tkv_check finds damaged fields; blocks of several sequences; pages.
 *
 * It reads and changes the fields of a cache (white.h).
 */
#include "white.h"
#include "sequences.h"

/* >>tkv_check finds damage */
static tkv_cache *make_cache_to_damage(void) {
    tkv_config cfg = make_config(2, 3);
    tkv_cache *kv;
    cfg.tiers.hot.k = cfg.tiers.hot.v = TKV_F32;
    kv = create_cache(&cfg);
    CHECK_EQ(append_to_all_layers(kv, 0, 0, 900, 100), TKV_OK);
    CHECK_EQ(append_to_all_layers(kv, 1, 1, 850, 100), TKV_OK);
    CHECK_EQ(tkv_seq_reserve(kv, 1, 100), TKV_OK);
    check_cache_at(kv, "before damage", 0);
    return kv;
}

static void expect_broken(const tkv_cache *kv, const char *what) {
    char reason[120];
    tkv_status st;
    memset(reason, '#', sizeof reason);
    st = tkv_check(kv, reason, sizeof reason);
    CHECK_MSG(st == TKV_ERR_BROKEN, "%s was not found", what);
    CHECK(st == TKV_OK || (strlen(reason) > 10 && strlen(reason) < sizeof reason));
    CHECK_EQ(tkv_check(kv, NULL, 0), st);
    CHECK_EQ(tkv_check(kv, reason, 5), st);
    CHECK(strlen(reason) < 5);
}

/* Puts a wrong value into a field, checks that tkv_check reports it, and restores the field. */
#define DAMAGE(field, wrong)                                                                                 \
    do {                                                                                                     \
        memcpy(saved, &(field), sizeof(field));                                                              \
        (field) = (wrong);                                                                                   \
        expect_broken(kv, #field " = " #wrong);                                                              \
        memcpy(&(field), saved, sizeof(field));                                                              \
        check_cache_at(kv, "repaired: " #field, 0);                                                          \
    } while (0)

TEST(check_finds_damage) {
    unsigned char saved[64];
    tkv_cache *kv = make_cache_to_damage();
    tkvi_list *list = tkvi_list_of(kv, 0, 0), *none = tkvi_list_of(kv, 2, 1);
    uint32_t *ids = tkvi_ids(kv, 0, 0), *others = tkvi_ids(kv, 1, 0);
    tkvi_block *first = tkvi_block_of(kv, ids[0]), *archive = tkvi_block_of(kv, ids[1]);
    tkvi_block *last = tkvi_block_of(kv, ids[list->n - 1]);
    tkvi_entry *first_entry = &kv->pool.entry[ids[0]], *archive_entry = &kv->pool.entry[ids[1]];
    tkvi_entry *last_entry = &kv->pool.entry[ids[list->n - 1]];
    tkvi_page *page = &kv->pool.page[first->page], *full = &kv->pool.page[last->page];
    uint64_t bit = (uint64_t)1;
    CHECK(list->sinks == 1 && list->archive > 1 && list->warm > 1 &&
          list->n > list->sinks + list->archive + list->warm);
    DAMAGE(first->refs, 0);
    DAMAGE(first->refs, 2);
    DAMAGE(archive->refs, 1000);
    DAMAGE(first_entry->start, -1);
    DAMAGE(archive_entry->start, archive_entry->start + 64);
    DAMAGE(archive_entry->start, -1);
    DAMAGE(last_entry->start, last_entry->start + 1);
    DAMAGE(last_entry->start, 1 << 30);
    DAMAGE(archive_entry->block, first_entry->block);
    DAMAGE(archive_entry->block, kv->pool.free_block);
    DAMAGE(last_entry->in_use, 0);
    DAMAGE(archive->layout, last->layout);
    DAMAGE(archive->slot, (uint16_t)(archive->slot ^ 1u));
    DAMAGE(archive->page, archive->page ^ 1u);
    DAMAGE(page->taken, page->taken & ~(bit << first->slot));
    DAMAGE(page->taken, page->taken | bit << 63);
    DAMAGE(page->taken, page->taken | bit << 5);
    DAMAGE(page->owner[first->slot], archive_entry->block);
    DAMAGE(page->owner[first->slot], 0xffffffffu);
    DAMAGE(page->owner[first->slot], 1u << 20);
    DAMAGE(page->used, page->used + 1);
    DAMAGE(page->used, page->used - 1);
    DAMAGE(full->size_class, page->size_class);
    DAMAGE(full->size_class, -1);
    DAMAGE(list->n, list->n - 1);
    DAMAGE(list->n, list->n + 1);
    DAMAGE(list->n, -1);
    DAMAGE(list->n, 0);
    DAMAGE(list->sinks, 0);
    DAMAGE(list->sinks, 2);
    DAMAGE(list->sinks, -1);
    DAMAGE(list->archive, list->archive + 1);
    DAMAGE(list->archive, list->archive - 1);
    DAMAGE(list->archive, -1);
    DAMAGE(list->warm, list->warm + 1);
    DAMAGE(list->warm, list->warm - 1);
    DAMAGE(list->warm, list->n);
    DAMAGE(list->len, 0);
    DAMAGE(list->len, list->len + 64);
    DAMAGE(list->len, list->len - 64);
    DAMAGE(list->expired, 4);
    DAMAGE(list->expired, -1);
    DAMAGE(none->len, -1);
    DAMAGE(none->n, 1);
    DAMAGE(kv->pool.reserved_slots[0], kv->pool.reserved_slots[0] + 1);
    DAMAGE(kv->reserved_slots[kv->tables.n_classes], kv->reserved_slots[kv->tables.n_classes] - 1);
    DAMAGE(kv->pool.n_blocks, kv->pool.n_blocks + 1);
    DAMAGE(kv->pool.n_free_pages, kv->pool.n_free_pages + 1);
    DAMAGE(kv->pool.free_page, kv->pool.free_page == TKVI_NIL ? 0 : TKVI_NIL);
    DAMAGE(kv->heap.held, kv->heap.held + 1);
    DAMAGE(kv->heap.held, kv->heap.held - 64);
    DAMAGE(kv->seq[0].cap, kv->seq[0].cap / 2);
    DAMAGE(kv->pool.block_cap, kv->pool.block_cap / 2);
    DAMAGE(ids[3], ids[4]);
    DAMAGE(ids[list->n - 1], kv->pool.free_entry);
    DAMAGE(ids[3], others[3]); /* an entry of another sequence with the same start and layout */
    {                          /* two wrong reference counts, whose sum is right */
        first->refs++;
        tkvi_block_of(kv, others[0])->refs--;
        expect_broken(kv, "one reference too many, another one too few");
        first->refs--;
        tkvi_block_of(kv, others[0])->refs++;
    }
    {
        int c;
        for (c = 0; c < kv->tables.n_classes; c++) {
            if (kv->pool.partial_pages[c] != TKVI_NIL) DAMAGE(kv->pool.partial_pages[c], TKVI_NIL);
            if (kv->pool.used_slots[c] > 1) DAMAGE(kv->pool.used_slots[c], kv->pool.used_slots[c] + 1);
            if (kv->pool.used_slots[c] > 1) DAMAGE(kv->pool.used_slots[c], kv->pool.used_slots[c] - 1);
        }
    }
    DAMAGE(kv->pool.free_block, first_entry->block); /* a block in use would be allocated next */
    DAMAGE(kv->pool.free_entry, ids[0]);
    DAMAGE(kv->pool.n_entries, kv->pool.n_entries - 1);
    CHECK_EQ(tkv_check(NULL, NULL, 0), TKV_ERR_ARG);
    CHECK_EQ(tkv_seq_fork(kv, 0, 2, TKV_UNLIMITED), TKV_OK);
    list = tkvi_list_of(kv, 0, 0);
    ids = tkvi_ids(kv, 0, 0);
    archive_entry = &kv->pool.entry[ids[1]];
    archive = tkvi_block_of(kv, ids[1]);
    CHECK_EQ(archive->refs, 2);
    DAMAGE(archive_entry->next_holder, ids[1]);
    DAMAGE(archive_entry->next_holder, ids[2]);
    DAMAGE(archive_entry->next_holder, 1u << 30);
    DAMAGE(archive_entry->is_first, !archive_entry->is_first);
    DAMAGE(archive_entry->tier, TKV_TIER_HOT);
    DAMAGE(archive_entry->tier, TKV_TIER_WARM);
    DAMAGE(archive->tier, TKV_TIER_WARM);
    DAMAGE(archive->n_shared_slots, 63);
    DAMAGE(kv->pool.n_late, 1);
    tkv_destroy(kv);
}

TEST(check_finds_damaged_anchors) {
    unsigned char saved[64];
    tkv_config cfg = make_config(1, 1);
    tkv_cache *kv;
    tkvi_list *list;
    tkvi_entry *anchors, *coded;
    tkvi_token_meta *meta;
    const uint32_t *ids;
    int i;
    cfg.tiers.n_anchors = 40; /* in two blocks of 20 */
    kv = create_cache(&cfg);
    CHECK_EQ(append_to_all_layers(kv, 0, 0, 600, 50), TKV_OK);
    list = tkvi_list_of(kv, 0, 0);
    ids = tkvi_ids(kv, 0, 0);
    CHECK_EQ(list->anchors, 2);
    CHECK_EQ(list->sinks, 3);
    for (i = 2; i + 1 < list->n && !kv->pool.token_meta[ids[i]].anchored_mask;) i++;
    anchors = &kv->pool.entry[ids[1]];
    coded = &kv->pool.entry[ids[i]];
    meta = &kv->pool.token_meta[ids[0]];
    CHECK(kv->pool.token_meta[ids[i]].anchored_mask != 0);
    CHECK_EQ(anchors->n_packed, 20);
    DAMAGE(list->anchors, 0);
    DAMAGE(list->anchors, 1);
    DAMAGE(list->anchors, 3);
    DAMAGE(list->anchors, -1);
    DAMAGE(list->sinks, 2);
    DAMAGE(list->sinks, 8);
    DAMAGE(anchors->has_anchors, 0);
    DAMAGE(anchors->start, 64);
    DAMAGE(anchors->n_packed, 0);
    DAMAGE(anchors->n_packed, 21);
    DAMAGE(anchors->evicted_mask, 1);
    DAMAGE(coded->has_anchors, 1);
    DAMAGE(coded->evicted_mask, 0);
    DAMAGE(meta->index.any[3], 599);
    tkv_destroy(kv);
}

/* As DAMAGE, and the reason has these words. */
#define DAMAGE_SAYS(field, wrong, words)                                                                     \
    do {                                                                                                     \
        memcpy(saved, &(field), sizeof(field));                                                              \
        (field) = (wrong);                                                                                   \
        expect_reason(kv, words);                                                                            \
        memcpy(&(field), saved, sizeof(field));                                                              \
        check_cache_at(kv, "repaired: " #field, 0);                                                          \
    } while (0)

static void expect_reason(const tkv_cache *kv, const char *words) {
    char reason[120] = "";
    CHECK_EQ(tkv_check(kv, reason, sizeof reason), TKV_ERR_BROKEN);
    CHECK_MSG(strstr(reason, words) != NULL, "\"%s\", and not \"%s\"", reason, words);
}

TEST(check_names_damaged_counts) {
    unsigned char saved[64];
    tkv_config cfg = make_config(3, 2);
    tkv_layer_config layers[3];
    tkvi_list *list, *shared;
    tkvi_pool *pool;
    tkv_cache *kv;
    int i;
    memset(layers, 0, sizeof layers);
    layers[2].share_kv = 1;
    cfg.layers = layers;
    cfg.limits.max_tokens = 2000;
    kv = create_cache(&cfg);
    CHECK_EQ(append_to_all_layers(kv, 0, 0, 1500, 100), TKV_OK);
    list = tkvi_list_of(kv, 0, 0);
    shared = tkvi_list_of(kv, 0, 2);
    pool = &kv->pool;
    DAMAGE_SAYS(shared->len, 5, "a layer without its own cache holds blocks");
    DAMAGE_SAYS(list->passed[TKVI_TIGHTEST], -1, "count as recoded");
    DAMAGE_SAYS(list->passed[TKVI_TIGHTEST], 1, "count as recoded");
    DAMAGE_SAYS(list->passed[TKVI_RECODED], list->archive + list->warm + 1, "count as recoded");
    list->passed[TKVI_RECODED] = list->archive + list->warm;
    DAMAGE_SAYS(list->passed[TKVI_TIGHTEST], list->archive + 1, "count as recoded");
    DAMAGE_SAYS(list->passed[TKVI_OFFLOADED_RUN], -1, "more blocks are counted as offloaded than exist");
    DAMAGE_SAYS(list->passed[TKVI_OFFLOADED_RUN], list->n, "more blocks are counted as offloaded than exist");
    DAMAGE_SAYS(list->passed[TKVI_OFFLOADED_RUN], 1, "a block in RAM is counted as offloaded");
    DAMAGE_SAYS(list->passed[TKVI_OFFLOADED_RUN], list->n - list->sinks,
                "a block in RAM is counted as offloaded");
    DAMAGE_SAYS(list->chunk_start, -1, "the last append began behind the end");
    DAMAGE_SAYS(list->chunk_start, list->len + 1, "the last append began behind the end");
    DAMAGE_SAYS(list->expired, list->len + 1, "a length is out of range");
    DAMAGE_SAYS(list->len, 2001, "a length is out of range");
    DAMAGE_SAYS(list->shift, 5, "the next position is not the length");
    list->is_moved = 1;
    DAMAGE_SAYS(list->shift, 5, "the next position does not follow the last token");
    list->is_moved = 0;
    DAMAGE_SAYS(list->expired, list->len, "blocks without tokens");
    DAMAGE_SAYS(list->expired, 4, "the first block does not follow the expired tokens");
    DAMAGE_SAYS(pool->n_offloaded, 1, "offloaded blocks are miscounted");
    DAMAGE_SAYS(pool->n_discarded, 1, "discarded blocks are miscounted");
    DAMAGE_SAYS(pool->free_block, pool->block[pool->free_block].page, "free blocks are miscounted");
    DAMAGE_SAYS(pool->free_entry, pool->entry[pool->free_entry].block, "free entries are miscounted");
    DAMAGE_SAYS(pool->block[pool->free_block].page, pool->free_block, "the list of free blocks is broken");
    DAMAGE_SAYS(pool->entry[pool->free_entry].block, pool->free_entry, "the list of free entries is broken");
    DAMAGE_SAYS(kv->tables.level, -1, "there is no level");
    DAMAGE_SAYS(kv->tables.level, kv->tables.n_levels, "there is no level");
    DAMAGE_SAYS(kv->tables.cfg.budget.bytes, 1000, "more is held than the budget");
    DAMAGE_SAYS(kv->seq[0].n_pages, 1, "a page is named whose tokens are gone");
    /* all coded blocks in the warm tier: the oldest is too old for it */
    CHECK(list->archive > 3);
    for (i = 0; i < list->archive; i++) pool->entry[tkvi_ids(kv, 0, 0)[list->sinks + i]].tier = TKV_TIER_WARM;
    list->warm += list->archive;
    list->archive = 0;
    list->passed[TKVI_TIGHTEST] = 0;
    expect_reason(kv, "a block is in its tier for too long");
    tkv_destroy(kv);
}

/* A slot without a token is coded as the row of the live one before it, or of the first live one; without any as zeros. */
TEST(dead_rows_repeat_live_ones) {
    static const struct {
        uint64_t dead_mask;
        float want[4];
    } cases[] = {
        {0, {1, 2, 3, 4}}, {2, {1, 1, 3, 4}}, {3, {3, 3, 3, 4}}, {12, {1, 2, 2, 2}}, {15, {0, 0, 0, 0}}};
    int i, t;
    for (i = 0; i < COUNT(cases); i++) {
        float x[8] = {1, 1, 2, 2, 3, 3, 4, 4};
        tkvi_fill_dead_rows(x, 2, 4, cases[i].dead_mask);
        for (t = 0; t < 8; t++) CHECK_NEAR(x[t], cases[i].want[t / 2], 0.0);
    }
}

TEST(check_names_damaged_entries) {
    unsigned char saved[64];
    tkv_cache *kv = make_cache_to_damage();
    tkvi_list *list = tkvi_list_of(kv, 0, 0);
    const uint32_t *ids;
    tkvi_entry *first, *coded, *last;
    CHECK_EQ(append_to_all_layers(kv, 0, 0, 20, 20), TKV_OK);
    ids = tkvi_ids(kv, 0, 0);
    first = &kv->pool.entry[ids[0]];
    coded = &kv->pool.entry[ids[1]];
    last = &kv->pool.entry[ids[list->n - 1]];
    CHECK(list->len - last->start < BLOCK / 2);
    DAMAGE_SAYS(coded->n_packed, 3, "an entry lists indices where none can");
    DAMAGE_SAYS(last->end_slot, BLOCK, "an entry has slots that no token can have");
    last->end_slot = 2;
    DAMAGE_SAYS(last->first_slot, 3, "an entry has slots that no token can have");
    last->end_slot = 0;
    DAMAGE_SAYS(last->first_slot, BLOCK, "a block has no tokens, or more than its capacity");
    DAMAGE_SAYS(first->shift, -1, "a token has a position that does not exist (-1)");
    DAMAGE_SAYS(last->shift, (1 << 30) - list->len + 1,
                "a token has a position that does not exist (1073741824)");
    DAMAGE_SAYS(tkvi_block_of(kv, ids[1])->copy_layout, 999, "a copy is in no known format");
    DAMAGE_SAYS(kv->tables.plan[0].now.warm, -2000, "a block is in its tier for too long");
    tkv_destroy(kv);
}

TEST(check_names_damaged_lists_of_indices) {
    unsigned char saved[64];
    uint64_t victims[16];
    tkv_config cfg = make_config(1, 1);
    tkvi_token_meta *meta;
    tkvi_entry *packed;
    const uint32_t *ids;
    tkvi_list *list;
    tkv_cache *kv;
    int i;
    cfg.evict.policy = TKV_EVICT_SLIDING;
    kv = create_cache(&cfg);
    CHECK_EQ(append_to_all_layers(kv, 0, 0, 900, 100), TKV_OK);
    for (i = 0; i < COUNT(victims); i++) victims[i] = 0x5555555555555555u;
    CHECK_EQ(evict_tokens(kv, 0, 0, victims, 500), TKV_OK);
    check_cache_at(kv, "evicted", 0);
    list = tkvi_list_of(kv, 0, 0);
    ids = tkvi_ids(kv, 0, 0);
    for (i = 0; i + 1 < list->n && !kv->pool.entry[ids[i]].n_packed;) i++;
    packed = &kv->pool.entry[ids[i]];
    meta = &kv->pool.token_meta[ids[i]];
    CHECK(packed->n_packed > 10 && !(packed->evicted_mask & 0xf));
    DAMAGE_SAYS(packed->n_packed, -1, "an entry lists indices where none can");
    DAMAGE_SAYS(packed->end_slot, 5, "an entry has slots that no token can have");
    DAMAGE_SAYS(packed->first_slot, (uint8_t)packed->n_packed, "an entry has slots that no token can have");
    DAMAGE_SAYS(meta->index.after_start[2], meta->index.after_start[1],
                "tokens of a packed block are out of order");
    DAMAGE_SAYS(meta->index.after_start[packed->n_packed - 1], 60000,
                "tokens of a packed block are out of order");
    tkv_destroy(kv);
}

/* Layer 0 has no window. In layer 1 named sinks are seen beyond it. */
TEST(check_names_damaged_sinks) {
    unsigned char saved[64];
    tkv_layer_config layers[2];
    tkv_config cfg = make_config(2, 1);
    const uint32_t *ids;
    tkvi_list *list;
    tkv_cache *kv;
    int i;
    memset(layers, 0, sizeof layers);
    layers[1].window = 100;
    layers[1].window_sinks = 1;
    cfg.layers = layers;
    kv = create_cache(&cfg);
    CHECK_EQ(append_to_all_layers(kv, 0, 0, 100, 100), TKV_OK);
    CHECK_EQ(tkv_seq_set_sinks(kv, 0, 70, 1, 1), TKV_OK);
    CHECK_EQ(append_to_all_layers(kv, 0, 0, 700, 100), TKV_OK);
    check_cache_at(kv, "with a named sink", 0);
    list = tkvi_list_of(kv, 0, 0);
    ids = tkvi_ids(kv, 0, 0);
    i = tkvi_block_at(kv, list, ids, 70);
    CHECK(tkvi_sink_mask(&kv->pool, ids[i]) != 0);
    DAMAGE_SAYS(kv->pool.entry[ids[i]].evicted_mask, kv->pool.entry[ids[i]].sink_mask,
                "a named sink is no token");
    CHECK(!tkvi_is_hot_layout(kv, 0, tkvi_block_of(kv, ids[i + 1])->layout));
    DAMAGE_SAYS(kv->pool.entry[ids[i + 1]].sink_mask, 1, "a named sink is not exact");
    list = tkvi_list_of(kv, 0, 1);
    ids = tkvi_ids(kv, 0, 1);
    i = tkvi_block_at(kv, list, ids, 70);
    CHECK(i >= list->sinks && tkvi_block_start(kv, ids, i) < list->expired);
    DAMAGE_SAYS(kv->pool.entry[ids[i]].evicted_mask, kv->pool.entry[ids[i]].evicted_mask & ~(uint64_t)1,
                "a token has expired beside a named sink");
    tkv_destroy(kv);
}

TEST(check_names_damaged_offloaded_blocks) {
    unsigned char saved[64];
    tkv_config cfg = make_f32_config(1, 1);
    tkvi_list *list;
    const uint32_t *ids;
    test_store store;
    tkv_cache *kv;
    int n = 0;
    cfg.tiers.sink_tokens = BLOCK; /* blocks of sinks are as large as others */
    attach_test_store(&store, &cfg);
    kv = create_cache(&cfg);
    CHECK_EQ(append_to_all_layers(kv, 0, 0, 900, 100), TKV_OK);
    CHECK_EQ(tkv_offload(kv, 0, 0, 3, &n), TKV_OK);
    CHECK_EQ(n, 3);
    list = tkvi_list_of(kv, 0, 0);
    ids = tkvi_ids(kv, 0, 0);
    check_cache_at(kv, "offloaded", 0);
    DAMAGE_SAYS(kv->tables.cfg.offload.write, NULL, "a block is offloaded that must stay in RAM");
    DAMAGE_SAYS(kv->pool.n_offloaded, 2, "offloaded blocks are miscounted");
    list->sinks++; /* the first offloaded block becomes one of sinks */
    list->archive--;
    list->passed[TKVI_OFFLOADED_RUN] = list->passed[TKVI_RECODED] = list->passed[TKVI_TIGHTEST] = 0;
    kv->pool.entry[ids[1]].tier = TKV_TIER_HOT;
    expect_reason(kv, "a block is offloaded that must stay in RAM");
    list->sinks--;
    list->archive++;
    kv->pool.entry[ids[1]].tier = TKV_TIER_ARCHIVE;
    check_cache_at(kv, "repaired", 0);
    tkv_destroy(kv);
    destroy_test_store(&store);
}

TEST(check_names_a_damaged_meter) {
    unsigned char saved[64];
    tkv_config cfg = make_config(2, 2);
    tkvi_head_probe *probe;
    tkvi_meter *m;
    tkv_cache *kv;
    int swapped;
    NEEDS_ATOMICS;
    cfg.meter.heads = 2;
    cfg.meter.tokens = 1024;
    kv = create_cache(&cfg);
    CHECK_EQ(append_to_all_layers(kv, 0, 0, 900, 100), TKV_OK);
    m = kv->meter;
    REQUIRE(m != NULL);
    probe = &m->head_probe[1];
    CHECK(m->seq == 0 && probe->n > 4 && probe->n < m->slots);
    check_cache_at(kv, "with copies", 0);
    DAMAGE_SAYS(m->seq, -2, "the meter watches a sequence that does not exist");
    DAMAGE_SAYS(m->seq, 2, "the meter watches a sequence that does not exist");
    DAMAGE_SAYS(m->seq, TKV_NO_SEQ, "the meter has copies without blocks");
    DAMAGE_SAYS(m->seq, 1, "the meter has a copy of a block that is not coded");
    DAMAGE_SAYS(probe->n, -1, "the meter has copies without blocks");
    DAMAGE_SAYS(probe->n, m->slots + 1, "the meter has copies without blocks");
    DAMAGE_SAYS(probe->stride, 0, "the meter has copies without blocks");
    DAMAGE_SAYS(probe->slot[0], -1, "a copy of the meter has no slot");
    DAMAGE_SAYS(probe->slot[0], m->slots, "a copy of the meter has no slot");
    DAMAGE_SAYS(probe->slot[0], probe->slot[1], "two copies of the meter share a slot");
    DAMAGE_SAYS(probe->start[1], probe->start[0], "copies out of order");
    DAMAGE_SAYS(probe->start[0], probe->start[0] + 1, "the meter has a copy of a block that is not coded");
    DAMAGE_SAYS(probe->start[probe->n - 1], 900, "the meter has a copy of a block that is not coded");
    DAMAGE_SAYS(probe->start[probe->n - 1], 4 + 13 * BLOCK,
                "the meter has a copy of a block that is not coded");
    swapped = probe->slot[0]; /* any order of the slots is right */
    probe->slot[0] = probe->slot[3];
    probe->slot[3] = swapped;
    check_cache_at(kv, "other slots", 0);
    tkv_destroy(kv);
}

static void put_state(tkv_cache *kv, int seq, int layer, int n_tokens) {
    static const char state[100] = "a state";
    CHECK_EQ(tkv_seq_put_state(kv, seq, layer, n_tokens, state, sizeof state), TKV_OK);
}

TEST(check_names_damaged_states) {
    unsigned char saved[64];
    tkv_config cfg = make_config(2, 3);
    tkvi_states *s;
    tkvi_state_list *list;
    tkvi_held_state swapped;
    tkv_cache *kv;
    int n;
    kv = create_cache(&cfg);
    CHECK_EQ(append_to_all_layers(kv, 0, 0, 100, 100), TKV_OK);
    for (n = 20; n <= 80; n += 20) {
        put_state(kv, 0, 0, n);
        put_state(kv, 0, 1, n);
    }
    CHECK_EQ(tkv_seq_fork(kv, 0, 1, 60), TKV_OK);
    check_cache_at(kv, "with states", 0);
    s = &kv->states;
    list = &s->list[0];
    CHECK_EQ(list->n, 8);
    DAMAGE_SAYS(s->n_stateful, 1, "stateful layers are miscounted");
    DAMAGE_SAYS(list->n, -1, "a list of states is longer than its memory");
    DAMAGE_SAYS(list->cap, 7, "a list of states is longer than its memory");
    DAMAGE_SAYS(list->held[0].state->layer, -1, "a state has no place");
    DAMAGE_SAYS(list->held[0].state->layer, 2, "a state has no place");
    DAMAGE_SAYS(list->held[0].state->n_tokens, 0, "a state has no place");
    DAMAGE_SAYS(list->held[0].state->size, 0, "a state has no place");
    DAMAGE_SAYS(list->held[7].state->n_tokens, 79, "states are out of order");
    DAMAGE_SAYS(list->held[1].state->layer, 0, "states are out of order");
    DAMAGE_SAYS(list->held[0].state->n_holders, 1, "the holders of a state are miscounted");
    DAMAGE_SAYS(list->held[7].state->n_holders, 2, "the holders of a state are miscounted");
    DAMAGE_SAYS(list->held[0].state->n_spare, list->held[0].state->n_spare + 1,
                "the holders of a state are miscounted");
    DAMAGE_SAYS(list->n_positions, 3, "positions of states are miscounted");
    DAMAGE_SAYS(s->held_bytes, s->held_bytes + 1, "bytes of states do not add up");
    DAMAGE_SAYS(s->spare_bytes, s->spare_bytes + 1, "bytes of states do not add up");
    DAMAGE_SAYS(s->limit, s->held_bytes - 1, "states take more than limits.state_bytes");
    list->held[7].is_spare = 1; /* the newest state is never spare */
    list->held[7].state->n_spare = 1;
    s->spare_bytes += tkvi_state_bytes(list->held[7].state->size);
    expect_reason(kv, "a state is spare that is not");
    list->held[7].is_spare = 0;
    list->held[7].state->n_spare = 0;
    s->spare_bytes -= tkvi_state_bytes(list->held[7].state->size);
    swapped = list->held[6];
    list->held[6] = list->held[7];
    list->held[7] = swapped;
    expect_reason(kv, "states are out of order");
    list->held[7] = list->held[6];
    list->held[6] = swapped;
    check_cache_at(kv, "repaired", 0);
    tkv_destroy(kv);
}

/* Moves a block to a page of its own, as if no page had been compacted. */
TEST(check_finds_pages_that_could_be_one) {
    tkv_cache *kv = make_cache_to_damage();
    tkvi_pool *pool = &kv->pool;
    uint32_t from, to, number;
    tkvi_block *b;
    int slot = 0;
    CHECK_EQ(tkvi_add_page(pool), 1);
    to = pool->free_page;
    for (from = 0; from < pool->n_pages &&
                   !(pool->page[from].size_class >= 0 && pool->page[from].used > 1 &&
                     pool->page[from].used < pool->tables->size_class[pool->page[from].size_class].slots);)
        from++;
    REQUIRE(from < pool->n_pages);
    while (!(pool->page[from].taken >> slot & 1)) slot++;
    number = pool->page[from].owner[slot];
    b = &pool->block[number];
    pool->page[from].taken &= ~((uint64_t)1 << slot);
    pool->page[from].used--;
    pool->free_page = pool->page[to].after;
    pool->n_free_pages--;
    pool->page[to].size_class = pool->page[from].size_class;
    pool->page[to].taken = 1;
    pool->page[to].used = 1;
    pool->page[to].owner[0] = number;
    b->page = to;
    b->slot = 0;
    tkvi_link_partial_page(pool, to);
    expect_reason(kv, "more pages than blocks need");
    tkv_destroy(kv);
}

/* A block that no list holds any more, and that was not freed. */
TEST(check_finds_a_lost_block) {
    tkv_cache *kv = make_cache_to_damage();
    tkvi_list *list = tkvi_list_of(kv, 0, 0);
    const uint32_t id = tkvi_ids(kv, 0, 0)[list->n - 1];
    tkvi_entry *e = &kv->pool.entry[id];
    list->n--;
    list->len = e->start;
    list->chunk_start = tkvi_min(list->chunk_start, list->len);
    e->in_use = 0;
    e->block = kv->pool.free_entry;
    kv->pool.free_entry = id;
    kv->pool.n_entries--;
    expect_reason(kv, "blocks count other holders than the lists have");
    tkv_destroy(kv);
}

/* The work space of eviction has room for the longest list of each sequence. */
TEST(work_space_for_the_longest_list) {
    int seq;
    for (seq = 0; seq < 3; seq++) { /* the longest one */
        tkv_config cfg = make_config(2, 3);
        tkv_cache *kv;
        int other;
        cfg.budget.bytes = 2 << 20;
        cfg.evict.policy = TKV_EVICT_SLIDING;
        kv = create_cache(&cfg);
        for (other = 0; other < 3; other++)
            CHECK_EQ(append_to_all_layers(kv, other, other, other == seq ? 1600 : 100, 50), TKV_OK);
        CHECK(kv->work.choice_cap >= kv->seq[seq].cap);
        CHECK_EQ(tkv_seq_reset(kv, (seq + 1) % 3), TKV_OK);
        CHECK(kv->seq[seq].cap > 20);
        CHECK_EQ(kv->work.choice_cap, kv->seq[seq].cap);
        CHECK_EQ(tkv_seq_reset(kv, seq), TKV_OK);
        CHECK(kv->work.choice_cap < 20);
        tkv_destroy(kv);
    }
}

/* Fixed memory has at most 2^30 - 1 pages: here one for each block of 435 sequences, and three for changes. */
TEST(most_pages_of_fixed_memory) {
    tkv_config cfg = make_config(1, 435);
    tkvi_derived_config h;
    tkvi_in_place_sizes sizes;
    int low = 1, high = TKVI_FOREVER, more;
    if (sizeof(size_t) < 8) SKIP("no memory of this size");
    cfg.tiers.sink_tokens = TKV_OFF;
    cfg.tiers.hot_tokens = TKV_UNLIMITED;
    while (low < high) { /* the least tokens of a sequence that take as many */
        cfg.limits.max_tokens = low + (high - low) / 2;
        CHECK_EQ(tkvi_validate(&cfg, &h, NULL, 0), TKV_OK);
        (void)tkvi_size_in_place(&h, &sizes);
        if (sizes.pages >= 0x3fffffff) high = cfg.limits.max_tokens;
        else low = cfg.limits.max_tokens + 1;
    }
    for (more = -64; more <= 64; more += 64) {
        cfg.limits.max_tokens = low + more;
        CHECK_EQ(tkvi_validate(&cfg, &h, NULL, 0), TKV_OK);
        CHECK_EQ(tkvi_size_in_place(&h, &sizes), more > 0 ? TKV_ERR_CONFIG : TKV_OK);
        CHECK_EQ(sizes.pages, 0x3fffffff + (more < 0 ? -435 : more > 0 ? 435 : 0));
    }
}

/* Under a budget, recoding has a page for each block size that the level with most of them writes. */
TEST(pages_for_recoding) {
    const tkv_format_pair four = pair_of(TKV_KIVI4, TKV_KIVI4), two = pair_of(TKV_KIVI2, TKV_KIVI2);
    int i;
    for (i = 0; i < 2; i++) {
        tkv_config cfg = make_config(2, 1);
        tkv_level ladder[2];
        tkv_cache *kv;
        memset(ladder, 0, sizeof ladder);
        ladder[0].warm = ladder[0].archive = four;
        ladder[1].warm = i ? four : two;
        ladder[1].archive = two;
        cfg.budget.ladder = ladder;
        cfg.budget.n_levels = 2;
        cfg.budget.bytes = 1 << 20;
        kv = create_cache(&cfg);
        CHECK_EQ(kv->tables.recode_pages, i + 1);
        CHECK_EQ(kv->pool.recode_pages, i + 1);
        tkv_destroy(kv);
    }
}

/* Sums of floats do not depend on their order. Negative numbers count as 0, and very large ones as 1e12. */
TEST(sums_of_small_and_large_floats) {
    static const float some[] = {.25f, 3.5f, 1e13f, -2.0f, 1e-6f, .75f, 0.0f};
    tkvi_wide_sum up = {0, 0}, down = {0, 0};
    int i;
    for (i = 0; i < COUNT(some); i++) {
        tkvi_add_to_wide_sum(&up, some[i]);
        tkvi_add_to_wide_sum(&down, some[COUNT(some) - 1 - i]);
    }
    CHECK(up.whole == 1000000000003 && up.part == down.part && down.whole == up.whole);
    CHECK_NEAR((double)up.part / (double)TKVI_WIDE_UNIT, 1.5 + 1e-6, 1e-11);
}

/* Errors of the meter are 0 to 16. NaN and infinities count as 16. */
TEST(errors_of_the_meter_are_limited) {
    const uint64_t one = (uint64_t)1 << 32;
    CHECK(tkvi_meter_fixed(.25) == one / 4);
    CHECK(tkvi_meter_fixed(16.0) == 16 * one && tkvi_meter_fixed(17.0) == 16 * one);
    CHECK(tkvi_meter_fixed(1e300) == 16 * one && tkvi_meter_fixed(-1e300) == 16 * one);
    CHECK(tkvi_meter_fixed((double)tkvi_from_bits(0x7fc00000u)) == 16 * one);
    CHECK(tkvi_meter_fixed(0.0) == 0 && tkvi_meter_fixed(-1.0) == 0);
}

/* tkv_check reports indices beyond the end of their tables and does not follow them. */
TEST(check_survives_wild_indices) {
    unsigned char saved[64];
    tkv_cache *kv = make_cache_to_damage();
    tkvi_list *list = tkvi_list_of(kv, 0, 0);
    uint32_t *ids = tkvi_ids(kv, 0, 0);
    tkvi_block *archive = tkvi_block_of(kv, ids[1]);
    tkvi_page *page = &kv->pool.page[archive->page];
    DAMAGE(ids[0], 1u << 30);
    DAMAGE(ids[3], 1u << 30);
    DAMAGE(ids[list->n - 1], 0xffffffffu);
    DAMAGE(archive->layout, 0xffff);
    DAMAGE(archive->slot, 0xffff);
    DAMAGE(archive->page, 0xffffffffu);
    DAMAGE(page->size_class, 1 << 20);
    DAMAGE(page->size_class, -5);
    DAMAGE(kv->pool.free_page, 1u << 30);
    DAMAGE(kv->pool.partial_pages[kv->tables.n_classes - 1], 1u << 30);
    DAMAGE(kv->pool.free_block, 1u << 30);
    DAMAGE(kv->pool.free_entry, 1u << 30);
    DAMAGE(kv->pool.entry[ids[1]].block, 1u << 30);
    DAMAGE(list->n, 0x7fffffff);
    DAMAGE(list->archive, 0x7fffffff);
    DAMAGE(list->len, 0x7fffffff);
    tkv_destroy(kv);
}

/* >>blocks of several sequences */
/* Sum of squared differences between what a sequence reads and what another cache reads, over all layers. Of tokens that
 * left a window, the caches hold different numbers, because blocks begin at different tokens. */
static double squared_error(tkv_cache *kv, int seq, tkv_cache *exact) {
    double sum = 0.0;
    int layer, i;
    for (layer = 0; layer < kv->tables.cfg.model.n_layers; layer++) {
        const int from =
                      tkvi_max(tkvi_list_of(kv, seq, layer)->expired, tkvi_list_of(exact, 0, layer)->expired),
                  n = tkv_get_length(kv, seq, layer) - from;
        CHECK_EQ(tkv_get_length(exact, 0, layer), from + n);
        CHECK(tkvi_list_of(kv, seq, layer)->expired <= tkvi_max(0, from + n - kv->tables.cfg.model.window) ||
              !kv->tables.cfg.model.window);
        CHECK_EQ(tkv_read(exact, 0, layer, from, n, k_want, v_want), TKV_OK);
        CHECK_EQ(tkv_read(kv, seq, layer, from, n, k_out, v_out), TKV_OK);
        for (i = 0; i < n * K_ROW; i++)
            sum += ((double)k_out[i] - (double)k_want[i]) * ((double)k_out[i] - (double)k_want[i]);
        for (i = 0; i < n * V_ROW; i++)
            sum += ((double)v_out[i] - (double)v_want[i]) * ((double)v_out[i] - (double)v_want[i]);
    }
    return sum;
}

/* Does the same to a sequence of `kv`, to a cache of its own, and to one that stores all tokens in F32. */
#define ALIKE(call_seq, call_own, call_exact)                                                                \
    do {                                                                                                     \
        st = (call_seq);                                                                                     \
        want_st = (call_own);                                                                                \
        CHECK_EQ((call_exact), want_st);                                                                     \
    } while (0)

/* Forks of a sequence live on for themselves. Each holds the tokens of a cache of its own, and its error is not much
 * larger: a shared block is as exact as its hottest holder has it. It is not the same, because a fork may begin a new
 * block at another token. */
TEST(shared_blocks) {
    tkv_rng rng = tkv_rng_seed(6);
    int round, rounds = tkv_test_quick() ? 8 : 60;
    for (round = 0; round < rounds; round++) {
        enum { SEQS = 4 };
        counting_allocator p;
        tkv_config cfg = make_config(2, SEQS), unshared_cfg = make_config(2, 1),
                   exact_cfg = make_f32_config(2, 1);
        tkv_cache *kv, *unshared[3], *exact[3];
        tkv_memory_info before, after;
        size_t empty_bytes;
        int n = 1 + tkv_rng_below(&rng, 700), chunk = 1 + tkv_rng_below(&rng, 200), i, step;
        cfg.host.allocator = counting_allocator_of(&p);
        if (round % 3 == 1)
            cfg.model.window = unshared_cfg.model.window = exact_cfg.model.window = 40 + round;
        if (round % 3 == 2)
            cfg.tiers.hot_tokens = unshared_cfg.tiers.hot_tokens = exact_cfg.tiers.hot_tokens = 1 + round * 3;
        kv = create_cache(&cfg);
        empty_bytes = p.held;
        for (i = 0; i < 3; i++) unshared[i] = create_cache(&unshared_cfg);
        for (i = 0; i < 3; i++) exact[i] = create_cache(&exact_cfg);
        note_config(&cfg);
        CHECK_EQ(append_to_all_layers(kv, 3, 9, 100, 100), TKV_OK); /* another sequence, in the same pages */
        CHECK_EQ(append_to_all_layers(kv, 0, 0, n, chunk), TKV_OK);
        for (i = 0; i < 3; i++) CHECK_EQ(append_to_all_layers(unshared[i], 0, 0, n, chunk), TKV_OK);
        for (i = 0; i < 3; i++) CHECK_EQ(append_to_all_layers(exact[i], 0, 0, n, chunk), TKV_OK);
        CHECK_EQ(tkv_get_memory(kv, &before), TKV_OK);
        CHECK_EQ(tkv_seq_fork(kv, 0, 1, TKV_UNLIMITED), TKV_OK);
        CHECK_EQ(tkv_seq_fork(kv, 1, 2, n + 5), TKV_OK);
        check_cache_at(kv, "shared", round);
        CHECK_EQ(tkv_get_memory(kv, &after), TKV_OK);
        CHECK_MEM(&after.tier, &before.tier, sizeof after.tier); /* a shared block counts once */
        CHECK_EQ(after.slack, before.slack);
        CHECK_EQ(after.total, p.held);
        {
            const int cut = at_least_0(n - tkv_rng_below(&rng, 150));
            const tkv_status st = tkv_seq_fork(kv, 1, 2, cut);
            CHECK_EQ(tkv_seq_truncate(unshared[2], 0, cut), st);
            CHECK_EQ(tkv_seq_truncate(exact[2], 0, cut), st);
            CHECK(st == TKV_OK || (cfg.model.window && st == TKV_ERR_RANGE));
        }
        for (step = 0; step < 25; step++) {
            int op = tkv_rng_below(&rng, 12), n_new = 1 + tkv_rng_below(&rng, step % 5 ? 20 : 200);
            tkv_status st, want_st;
            i = tkv_rng_below(&rng, 3);
            st = want_st = TKV_OK;
            if (op < 5) {
                ALIKE(append_to_all_layers(kv, i, 10 + i, n_new, n_new),
                      append_to_all_layers(unshared[i], 0, 10 + i, n_new, n_new),
                      append_to_all_layers(exact[i], 0, 10 + i, n_new, n_new));
            } else if (op == 5) { /* an append that gets no memory changes no token */
                snapshot before_append = snapshot_of_tokens(kv);
                p.fail_at = 1;
                st = append_tokens(kv, i, 0, 10 + i, n_new);
                p.fail_at = 0;
                if (st == TKV_ERR_NOMEM) {
                    snapshot after_append = snapshot_of_tokens(kv);
                    CHECK(is_same_snapshot(&before_append, &after_append));
                    free_snapshot(&after_append);
                    CHECK_EQ(append_tokens(kv, i, 0, 10 + i, n_new), TKV_OK);
                } else CHECK_EQ(st, TKV_OK);
                free_snapshot(&before_append);
                ALIKE(append_tokens(kv, i, 1, 10 + i, n_new),
                      append_to_all_layers(unshared[i], 0, 10 + i, n_new, n_new),
                      append_to_all_layers(exact[i], 0, 10 + i, n_new, n_new));
            } else if (op < 8) {
                const tkv_flush_mode how = op == 6 ? TKV_FLUSH_FULL : TKV_FLUSH_ALL;
                ALIKE(tkv_seq_flush(kv, i, how), tkv_seq_flush(unshared[i], 0, how),
                      tkv_seq_flush(exact[i], 0, how));
            } else if (op < 10) {
                const int cut = at_least_0(tkv_get_length(kv, i, TKV_ALL_LAYERS) - tkv_rng_below(&rng, 70));
                ALIKE(tkv_seq_truncate(kv, i, cut), tkv_seq_truncate(unshared[i], 0, cut),
                      tkv_seq_truncate(exact[i], 0, cut));
            } else if (op == 10) {
                CHECK_EQ(tkv_seq_begin(kv, i), TKV_OK);
                CHECK_EQ(tkv_seq_begin(unshared[i], 0), TKV_OK);
                CHECK_EQ(tkv_seq_begin(exact[i], 0), TKV_OK);
                CHECK_EQ(append_to_all_layers(kv, i, 50, n_new, n_new), TKV_OK);
                ALIKE(tkv_seq_abort(kv, i), tkv_seq_abort(unshared[i], 0), tkv_seq_abort(exact[i], 0));
            } else { /* reserve, then append without memory: shared tails are copied, shared blocks demoted */
                CHECK_EQ(tkv_seq_reserve(kv, i, n_new), TKV_OK);
                check_cache_at(kv, "reserved", step);
                p.fail_at = 1;
                ALIKE(append_to_all_layers(kv, i, 10 + i, n_new, n_new),
                      append_to_all_layers(unshared[i], 0, 10 + i, n_new, n_new),
                      append_to_all_layers(exact[i], 0, 10 + i, n_new, n_new));
                p.fail_at = 0;
            }
            CHECK_MSG(st == want_st, "round %d step %d op %d: %s, unshared %s", round, step, op,
                      tkv_get_status_text(st), tkv_get_status_text(want_st));
            check_cache_at(kv, "step", step);
            CHECK_EQ(tkv_get_memory(kv, &after), TKV_OK);
            CHECK_EQ(after.total, p.held);
            if (step % 5 < 4) continue;
            for (i = 0; i < 3; i++) {
                const double want = squared_error(unshared[i], 0, exact[i]),
                             error = squared_error(kv, i, exact[i]);
                CHECK_MSG(error <= 1.5 * want + 1e-3, "round %d step %d sequence %d: error %g, unshared %g",
                          round, step, i, error, want);
            }
        }
        for (i = 0; i < 3; i++) {
            CHECK_EQ(tkv_seq_reset(kv, (i + round) % 3), TKV_OK);
            check_cache_at(kv, "released", i);
            tkv_destroy(unshared[i]);
            tkv_destroy(exact[i]);
        }
        check_read(kv, 3, 0, 9, tkv_get_length(kv, 3, 0) - 1, 1, TKV_F16);
        CHECK_EQ(tkv_seq_reset(kv, 3), TKV_OK);
        CHECK_EQ(kv->pool.n_blocks, 0);
        CHECK_EQ(kv->pool.n_pages, 0);
        CHECK(p.held >= empty_bytes);
        tkv_destroy(kv);
        CHECK_EQ(p.held, 0);
    }
}

/* The first sequence that appends writes into a shared partial tail. The next one gets a copy of it. A shared block is coded again once, when its last
 * holder demotes it, or when the last one that had it exact is gone. */
static void follow_a_shared_block(int last_leaves) {
    tkv_config cfg = make_config(1, 3);
    tkv_cache *kv = create_cache(&cfg);
    tkvi_list *a = tkvi_list_of(kv, 0, 0), *b = tkvi_list_of(kv, 1, 0);
    uint32_t n_blocks;
    const tkvi_block *tail, *full;
    int i;
    snapshot before, after;
    CHECK_EQ(append_to_all_layers(kv, 0, 0, 4 + 64 + 40, 1), TKV_OK);
    CHECK_EQ(tkv_seq_fork(kv, 0, 1, TKV_UNLIMITED), TKV_OK);
    tail = tkvi_block_of(kv, tkvi_ids(kv, 0, 0)[a->n - 1]);
    n_blocks = kv->pool.n_blocks;
    CHECK_EQ(tail->refs, 2);
    before = snapshot_of_seq(kv, 0);
    CHECK_EQ(append_tokens(kv, 1, 0, 1, 1), TKV_OK); /* the full block is not demoted yet */
    CHECK_EQ(append_tokens(kv, 1, 0, 1, 1), TKV_OK);
    CHECK_EQ(kv->pool.n_blocks, n_blocks);
    CHECK_EQ(tail->refs, 2);
    CHECK_EQ(tail->n_shared_slots, 42);
    CHECK(tkvi_block_of(kv, tkvi_ids(kv, 0, 0)[a->n - 1]) == tail &&
          tkvi_block_of(kv, tkvi_ids(kv, 1, 0)[b->n - 1]) == tail);
    CHECK_EQ(tkv_seq_fork(kv, 0, 2, TKV_UNLIMITED), TKV_OK);
    CHECK_EQ(append_tokens(kv, 2, 0, 2, 1), TKV_OK); /* the slot is taken */
    CHECK_EQ(kv->pool.n_blocks, n_blocks + 1);
    CHECK_EQ(tail->refs, 2);
    check_cache_at(kv, "a copied tail", 0);
    CHECK_EQ(tkv_seq_reset(kv, 2), TKV_OK);
    CHECK_EQ(append_tokens(kv, 0, 0, 0, 0), TKV_OK);
    after = snapshot_of_seq(kv, 0);
    CHECK(is_same_snapshot(&before, &after));
    free_snapshot(&after);
    n_blocks = kv->pool.n_blocks;
    full = tkvi_block_of(kv, tkvi_ids(kv, 0, 0)[1]);
    CHECK_EQ(append_to_all_layers(kv, 1, 1, 60, 1), TKV_OK); /* the full block is warm in sequence 1 */
    CHECK(b->warm == 1 && a->warm == 0);
    CHECK(full == tkvi_block_of(kv, tkvi_ids(kv, 1, 0)[1]) && full->refs == 2);
    CHECK_EQ(kv->tables.layout[full->layout].key, kv->tables.plan[0].now.key[TKV_TIER_HOT]);
    after = snapshot_of_seq(kv, 0);
    CHECK(is_same_snapshot(&before, &after));
    free_snapshot(&after);
    free_snapshot(&before);
    check_read(kv, 0, 0, 0, 0, 108, TKV_F16);
    check_cache_at(kv, "one holder has the block warm", 0);
    CHECK_EQ(tkv_seq_fork(kv, 1, 2, TKV_UNLIMITED), TKV_OK); /* to see it warm after sequence 0 left */
    CHECK_EQ(full->refs, 3);
    if (last_leaves) {
        CHECK_EQ(tkv_seq_reset(kv, 0), TKV_OK);
        CHECK_EQ(kv->pool.n_late, 1);
        check_cache_at(kv, "a late block", 0);
        CHECK_EQ(append_to_all_layers(kv, 1, 1, 1, 1), TKV_OK);
        CHECK_EQ(full->refs, 2);
    } else {
        CHECK_EQ(append_to_all_layers(kv, 0, 0, 70, 1), TKV_OK);
        CHECK_EQ(full->refs, 3);
        CHECK_EQ(a->warm, 1);
    }
    CHECK_EQ(kv->pool.n_late, 0);
    CHECK_EQ(kv->tables.layout[full->layout].key, kv->tables.plan[0].now.key[TKV_TIER_WARM]);
    check_cache_at(kv, "coded for all", 0);
    for (i = 0; i < 3; i++) CHECK_EQ(tkv_seq_reset(kv, i), TKV_OK);
    CHECK_EQ(kv->pool.n_blocks, 0);
    check_cache_at(kv, "none left", 0);
    tkv_destroy(kv);
}

TEST(shared_tail_and_shared_demotion) {
    follow_a_shared_block(0);
    follow_a_shared_block(1);
}

/* >>pages */
typedef struct size_log {
    counting_allocator p;
    size_t sizes[64];
    int n; /* allocations since it was set to 0 */
} size_log;

static void *log_alloc(void *user, size_t size, size_t align) {
    size_log *log = (size_log *)user;
    if (log->n < COUNT(log->sizes)) log->sizes[log->n++] = size;
    return counting_alloc(&log->p, size, align);
}

static void log_release(void *user, void *ptr, size_t size, size_t align) {
    counting_release(&((size_log *)user)->p, ptr, size, align);
}

static tkv_allocator size_log_of(size_log *log) {
    tkv_allocator a;
    memset(log, 0, sizeof *log);
    a.user = log;
    a.alloc = log_alloc;
    a.release = log_release;
    return a;
}

/* Returns the allocations of a table that has grown to cap entries, by a quarter each time. */
static int count_growths(uint32_t cap) {
    uint32_t entries = 16;
    int n = 1;
    for (; entries < cap; entries += entries / 4) n++;
    return n;
}

/* Appends allocate pages and, rarely, larger tables, and nothing else. */
TEST(appends_allocate_pages_and_tables) {
    int has_window, i, n;
    for (has_window = 0; has_window < 2; has_window++) { /* with a window, the cache stops growing */
        tkv_config cfg = make_config(2, 1);
        tkv_cache *kv;
        size_log log;
        size_t page;
        int tables = 0;
        long pages = 0;
        if (has_window) cfg.model.window = 100;
        cfg.host.allocator = size_log_of(&log);
        kv = create_cache(&cfg);
        page = kv->tables.page_bytes;
        for (n = 0; n < 3000; n++) {
            log.n = 0;
            CHECK_EQ(append_to_all_layers(kv, 0, 0, 1, 1), TKV_OK);
            for (i = 0; i < log.n; i++) {
                if (log.sizes[i] == page) pages++;
                else tables++;
            }
            CHECK(log.n <= 9);
            if (has_window && n > 1000) CHECK_LE(log.p.held, log.p.peak);
            if (has_window && n > 1000 && tables)
                CHECK_EQ(tables, 3); /* first list, block table, page table */
        }
        CHECK(pages >= (long)kv->pool.n_pages);
        if (has_window) CHECK_EQ(tables, 3);
        else
            CHECK_EQ(tables, count_growths(kv->pool.block_cap) + count_growths(kv->pool.page_cap) +
                                 count_growths(kv->seq[0].cap));
        CHECK_LE(pages, 2 * (3000 / 64 + 1) * 3); /* at most one page per block and demotion */
        tkv_destroy(kv);
        CHECK_EQ(log.p.held, 0);
    }
}

/* Slack is one partial page per size class, the rest at the end of each page, and padding. */
TEST(page_waste_is_bounded) {
    static const int dims[] = {16, 64, 80, 96, 128, 256}, heads[] = {1, 2, 8};
    static const tkv_format warm[] = {TKV_KIVI4, TKV_Q8, TKV_KIVI3},
                            archive[] = {TKV_KIVI2, TKV_KIVI4, TKV_KIVI3};
    int d, h, f, lengths[] = {5000, 20000}, l, group, n = 0;
    double share, sum = 0;
    for (d = 0; d < COUNT(dims); d++)
        for (h = 0; h < COUNT(heads); h++)
            for (f = 0; f < COUNT(warm); f++)
                for (group = 32; group <= 64; group += 32)
                    for (l = 0; l < COUNT(lengths); l++) {
                        tkv_config cfg = tkv_default_config();
                        tkv_memory_info m;
                        tkvi_derived_config derived;
                        size_t pages, max_rest = 0, c;
                        cfg.model.n_layers = 24;
                        cfg.model.n_heads = cfg.model.n_kv_heads = heads[h];
                        cfg.model.head_dim = dims[d];
                        cfg.tiers.warm.k = cfg.tiers.warm.v = warm[f];
                        cfg.tiers.archive.k = cfg.tiers.archive.v = archive[f];
                        cfg.format.group_size = group;
                        if (tkv_estimate_memory(&cfg, lengths[l], 1, &m) != TKV_OK) {
                            CHECK_EQ(sizeof(size_t), 4); /* the total does not fit in size_t */
                            continue;
                        }
                        CHECK_EQ(tkvi_derive_config(&cfg, &derived), TKV_OK);
                        pages = (m.total - m.tables - m.index - m.scratch) / derived.page_bytes;
                        for (c = 0; c < (size_t)derived.n_classes; c++) {
                            size_t rest = derived.page_bytes - (size_t)derived.size_class[c].slots *
                                                                   derived.size_class[c].slot_bytes;
                            if (derived.size_class[c].slots < 64 && rest > max_rest) max_rest = rest;
                        }
                        CHECK_LE(m.slack, (size_t)derived.n_classes * derived.page_bytes + pages * max_rest);
                        share = (double)m.slack / (double)m.total;
                        CHECK_LE(share, 0.06);
                        sum += share;
                        n++;
                    }
    CHECK_LE(sum / n, 0.015);
}

/* After random appends and resets, pages in use are the fewest that hold the blocks. */
TEST(pages_do_not_fragment) {
    static float k[200 * 40], v[200 * 8];
    tkv_config cfg = make_config(2, 6);
    tkv_rng rng = tkv_rng_seed(44);
    tkv_cache *kv;
    int step, layer, c, n_steps = tkv_test_quick() ? 100 : 1500;
    cfg.model.n_kv_heads = cfg.model.n_heads = 1;
    cfg.model.head_dim = 40;
    cfg.model.v_head_dim = 8;
    kv = create_cache(&cfg);
    for (step = 0; step < n_steps; step++) {
        int seq = tkv_rng_below(&rng, 6);
        int64_t pages = 0;
        if (tkv_get_length(kv, seq, TKV_ALL_LAYERS) > 1500 || tkv_rng_below(&rng, 12) == 0)
            CHECK_EQ(tkv_seq_reset(kv, seq), TKV_OK);
        else {
            const int n = 1 + tkv_rng_below(&rng, 200);
            tkv_rng_fill(&rng, k, (size_t)(n * 40), 1.0);
            tkv_rng_fill(&rng, v, (size_t)(n * 8), 1.0);
            for (layer = 0; layer < 2; layer++) CHECK_EQ(tkv_append(kv, seq, layer, k, v, n), TKV_OK);
        }
        for (c = 0; c < kv->tables.n_classes; c++) {
            int slots = kv->tables.size_class[c].slots;
            pages += (kv->pool.used_slots[c] + slots - 1) / slots;
        }
        CHECK_EQ(kv->pool.n_pages, pages);
        check_cache_at(kv, "fragments", step);
    }
    tkv_destroy(kv);
}

/* >>memory comes back */
enum { SHRINK_SEQS = 3 };

typedef struct shrink_case {
    const char *name;
    tkv_config cfg;
    int has_store;
} shrink_case;

static shrink_case make_shrink_case(int which) {
    shrink_case c;
    memset(&c, 0, sizeof c);
    c.cfg = make_config(3, SHRINK_SEQS);
    c.cfg.tiers.hot_tokens = 100;
    c.cfg.tiers.warm_tokens = 256;
    c.name = "plain";
    if (which == 1) {
        c.name = "evict";
        c.cfg.evict.policy = TKV_EVICT_H2O;
        c.cfg.evict.keep_tokens = 600;
    } else if (which == 2) {
        c.name = "anchors, importance";
        c.cfg.tiers.sink_tokens = 4;
        c.cfg.tiers.n_anchors = 8;
        c.cfg.importance.sample_every = 8;
    } else if (which == 3) {
        c.name = "windows";
        c.cfg.model.window = 300;
    } else if (which == 4) {
        c.name = "budget";
        c.cfg.budget.bytes = 700 * 1000;
    } else if (which == 5) {
        c.name = "budget, store, exact copies";
        c.has_store = c.cfg.offload.keep_exact = 1;
        c.cfg.budget.bytes = 450 * 1000;
    } else if (which == 6) {
        c.name = "budget, evict";
        c.cfg.budget.bytes = 400 * 1000;
        c.cfg.evict.policy = TKV_EVICT_SLIDING;
    }
    return c;
}
enum { N_SHRINK_CASES = 7 };

/* Bytes held, without learned tables, beyond those of a fresh cache that was given the same tokens. */
static long bytes_above_fresh(tkv_cache *kv, const shrink_case *c) {
    tkv_config cfg = c->cfg;
    tkv_memory_info m, fresh_memory;
    test_store store;
    tkv_cache *fresh;
    int seq;
    if (c->has_store) attach_test_store(&store, &cfg);
    fresh = create_cache(&cfg);
    for (seq = 0; seq < SHRINK_SEQS; seq++)
        CHECK_EQ(append_to_all_layers(fresh, seq, seq, tkv_get_length(kv, seq, TKV_ALL_LAYERS), 50), TKV_OK);
    CHECK_EQ(tkv_get_memory(kv, &m), TKV_OK);
    CHECK_EQ(tkv_get_memory(fresh, &fresh_memory), TKV_OK);
    tkv_destroy(fresh);
    if (c->has_store) destroy_test_store(&store);
    return (long)(m.total - m.tables) - (long)(fresh_memory.total - fresh_memory.tables);
}

static void check_near_fresh(tkv_cache *kv, const shrink_case *c, int step) {
    const long above = bytes_above_fresh(kv, c);
    /* a page for each class, and for the short blocks that cuts leave, one step of the tables of blocks and entries */
    const long bound = (long)kv->tables.page_bytes * kv->tables.n_classes +
                       (long)(kv->pool.block_cap / 5 + 1) * (long)tkvi_block_entry_bytes(&kv->tables.cfg);
    CHECK_MSG(above <= bound, "%s %d: %ld bytes above a fresh cache, of at most %ld", c->name, step, above,
              bound);
    check_cache_at(kv, c->name, step);
    CHECK_LE(kv->heap.peak, c->cfg.budget.bytes ? c->cfg.budget.bytes : kv->heap.peak);
}

/* After a reset or a cut, a cache holds at most a page for each size class more than a fresh cache with the same
 * tokens. A cache without tokens holds as much as a new one. */
TEST(memory_comes_back) {
    int which, seq;
    for (which = 0; which < N_SHRINK_CASES; which++) {
        const shrink_case c = make_shrink_case(which);
        tkv_config cfg = c.cfg;
        test_store store;
        tkv_cache *kv;
        size_t empty;
        if (c.has_store) attach_test_store(&store, &cfg);
        kv = create_cache(&cfg);
        empty = kv->heap.held - tkvi_learning_bytes(kv);
        for (seq = 0; seq < SHRINK_SEQS; seq++)
            CHECK_EQ(append_to_all_layers(kv, seq, seq, 1800 - 700 * (seq == 1), 50), TKV_OK);
        CHECK_EQ(tkv_seq_truncate(kv, 1, tkv_get_length(kv, 1, 0) - 40), TKV_OK);
        check_near_fresh(kv, &c, 0);
        CHECK_EQ(tkv_seq_reset(kv, 0), TKV_OK);
        check_near_fresh(kv, &c, 1);
        CHECK_EQ(append_to_all_layers(kv, 0, 0, 200, 50), TKV_OK);
        CHECK_EQ(tkv_seq_reset(kv, 2), TKV_OK);
        check_near_fresh(kv, &c, 2);
        CHECK_EQ(tkv_seq_reset(kv, 0), TKV_OK);
        check_near_fresh(kv, &c, 3);
        CHECK_EQ(tkv_seq_reset(kv, 1), TKV_OK);
        CHECK_EQ(kv->heap.held - tkvi_learning_bytes(kv), empty);
        tkv_destroy(kv);
        if (c.has_store) destroy_test_store(&store);
    }
}

/* The same after random histories. Another sequence keeps its values, also where the store has them. */
TEST(memory_comes_back_after_random_histories) {
    const int n_steps = tkv_test_quick() ? 60 : 400;
    int which, step;
    for (which = 0; which < N_SHRINK_CASES; which++) {
        const shrink_case c = make_shrink_case(which);
        tkv_config cfg = c.cfg;
        tkv_rng rng = tkv_rng_seed((uint64_t)which + 1);
        test_store store;
        tkv_cache *kv;
        int n_cuts = 0;
        if (c.has_store) attach_test_store(&store, &cfg);
        kv = create_cache(&cfg);
        for (step = 0; step < n_steps; step++) {
            const int what = tkv_rng_below(&rng, 10), seq = tkv_rng_below(&rng, SHRINK_SEQS);
            const int seq_len = tkv_get_length(kv, seq, TKV_ALL_LAYERS);
            const int compares = step % 3 == 0 && !c.cfg.evict.policy; /* evicted tokens cannot be read */
            snapshot before;
            tkv_status st;
            if (what < 6 && seq_len < 1500) {
                CHECK_EQ(append_to_all_layers(kv, seq, seq, 1 + tkv_rng_below(&rng, 300), 50), TKV_OK);
                continue;
            }
            if (compares) before = snapshot_of_seq(kv, (seq + 1) % SHRINK_SEQS);
            st = what < 8 ? tkv_seq_truncate(kv, seq, tkv_rng_below(&rng, seq_len + 1))
                          : tkv_seq_reset(kv, seq);
            CHECK(st == TKV_OK || (what < 8 && st == TKV_ERR_RANGE));
            if (compares) {
                snapshot after = snapshot_of_seq(kv, (seq + 1) % SHRINK_SEQS);
                CHECK(is_same_snapshot(&before, &after));
                free_snapshot(&before);
                free_snapshot(&after);
            }
            if (st) continue;
            n_cuts++;
            check_near_fresh(kv, &c, step);
        }
        CHECK(n_cuts > n_steps / 8);
        tkv_destroy(kv);
        if (c.has_store) destroy_test_store(&store);
    }
}

/* Other sequences keep their values when their blocks get other numbers. Reservations keep their memory. A failing
 * allocator only leaves more memory behind. */
TEST(shrinking_keeps_the_rest) {
    int fail_at, has_budget;
    for (has_budget = 0; has_budget < 2; has_budget++)
        for (fail_at = 0; fail_at < 6; fail_at++) {
            tkv_config cfg = make_f32_config(3, 3);
            counting_allocator p;
            tkv_cache *kv;
            snapshot before, after;
            int i, n_requests;
            size_t held;
            cfg.host.allocator = counting_allocator_of(&p);
            cfg.evict.policy = TKV_EVICT_H2O;
            if (has_budget) cfg.budget.bytes = 4000 * 1000;
            kv = create_cache(&cfg);
            for (i = 0; i < 9; i++) CHECK_EQ(append_to_all_layers(kv, i % 3, i % 3, 150, 50), TKV_OK);
            CHECK_EQ(tkv_seq_reserve(kv, 2, 500), TKV_OK);
            CHECK_EQ(tkv_seq_begin(kv, 1), TKV_OK);
            CHECK_EQ(append_to_all_layers(kv, 1, 1, 10, 10), TKV_OK);
            before = snapshot_of_seq(kv, 1);
            add_sequence_to_snapshot(&before, kv, 2);
            held = p.held;
            p.fail_at = fail_at;
            CHECK_EQ(tkv_seq_reset(kv, 0), TKV_OK);
            p.fail_at = 0;
            CHECK(p.held < held);
            check_cache_at(kv, "shrunk", fail_at);
            after = snapshot_of_seq(kv, 1);
            add_sequence_to_snapshot(&after, kv, 2);
            CHECK(is_same_snapshot(&before, &after));
            free_snapshot(&before);
            free_snapshot(&after);
            CHECK_EQ(tkv_seq_abort(kv, 1), TKV_OK);
            CHECK_EQ(tkv_get_length(kv, 1, TKV_ALL_LAYERS), 450);
            n_requests = p.n_requests;
            CHECK_EQ(append_to_all_layers(kv, 2, 2, 500, 50), TKV_OK);
            CHECK_EQ(p.n_requests, n_requests);
            check_read(kv, 2, 1, 2, 0, 950, TKV_F32);
            tkv_destroy(kv);
            CHECK_EQ(p.held, 0);
        }
}

/* >>the table of rotations */
/* Attention of the newest query of layer 1. */
static void attend_newest(tkv_cache *kv, int seq, float *out) {
    tkv_rng rng = tkv_rng_seed(6);
    float q[2 * KV_HEADS * DIM];
    tkv_rng_fill(&rng, q, COUNT(q), 1.0);
    CHECK_EQ(tkv_attend(kv, seq, 1, q, 1, out), TKV_OK);
}

/* Moves the tokens behind each of n borders by 3 positions. */
static void move_behind_borders(tkv_cache *kv, int seq, int n) {
    int i;
    for (i = 0; i < n; i++) CHECK_EQ(tkv_seq_shift(kv, seq, 10 + 20 * i + 3 * i, TKV_UNLIMITED, 3), TKV_OK);
}

/* The table has the distances of all tokens, and those alone once it was full. Attention has the same bits without it.
 * It is gone when no token has moved, and when the last sequence ends. */
TEST(rotations_are_kept_while_tokens_have_them) {
    tkv_config cfg = make_config(2, 2);
    tkv_layer_config layers[2];
    float out[2 * KV_HEADS * V_DIM], want[2 * KV_HEADS * V_DIM];
    tkv_cache *kv;
    int i, n;
    memset(layers, 0, sizeof layers);
    layers[1].rope.dim = 8;
    cfg.layers = layers;
    cfg.model.rope.dim = DIM;
    kv = create_cache(&cfg);
    CHECK_EQ(kv->turns.cap, 0);
    CHECK_EQ(append_to_all_layers(kv, 0, 1, 900, 100), TKV_OK);
    for (n = 1; n <= 40; n += 13) {
        move_behind_borders(kv, 0, n);
        CHECK(kv->turns.n >= 2 * n);
        for (i = 1; i < kv->turns.n; i++) {
            const tkvi_turn_key *a = &kv->turns.key[i - 1], *b = &kv->turns.key[i];
            CHECK(a->rope < b->rope || (a->rope == b->rope && a->turned < b->turned));
        }
        attend_newest(kv, 0, want);
        i = kv->turns.n;
        kv->turns.n = 0; /* as if there had been no memory */
        attend_newest(kv, 0, out);
        kv->turns.n = i / 2; /* the second half */
        attend_newest(kv, 0, out);
        kv->turns.n = i;
        CHECK_MEM(out, want, sizeof out);
        check_cache_at(kv, "borders", n);
    }
    for (i = 0; i < 300; i++) CHECK_EQ(tkv_seq_shift(kv, 0, 0, TKV_UNLIMITED, 5), TKV_OK);
    tkvi_drop_turns(kv);
    CHECK(kv->turns.n <= 2 * (1 + 1 + 14 + 27 + 40) && kv->turns.cap < 400);
    attend_newest(kv, 0, out);
    CHECK_EQ(tkv_seq_fork(kv, 0, 1, TKV_UNLIMITED), TKV_OK);
    CHECK_EQ(tkv_seq_reset(kv, 0), TKV_OK);
    attend_newest(kv, 1, want);
    CHECK_MEM(out, want, sizeof out);
    CHECK(kv->turns.cap > 0);
    CHECK_EQ(tkv_seq_reset(kv, 1), TKV_OK);
    CHECK_EQ(kv->turns.cap, 0);
    CHECK_EQ(append_to_all_layers(kv, 0, 1, 300, 100), TKV_OK);
    CHECK_EQ(tkv_seq_shift(kv, 0, 0, TKV_UNLIMITED, 5), TKV_OK);
    CHECK_EQ(kv->turns.n, 2);
    CHECK_EQ(tkv_seq_shift(kv, 0, 0, TKV_UNLIMITED, -5), TKV_OK);
    CHECK_EQ(kv->turns.cap, 0);
    check_cache_at(kv, "moved back", 0);
    tkv_destroy(kv);
}

/* Without memory for the table, in place with less than it takes, and under a budget that tokens need, attention has the
 * bits of a cache with a whole table. */
TEST(rotations_are_not_needed) {
    enum { BYTES = 1 << 20 };
    tkv_config cfg = make_config(2, 1);
    float want[2 * KV_HEADS * V_DIM], out[2 * KV_HEADS * V_DIM];
    uint8_t *memory = (uint8_t *)malloc(BYTES);
    tkv_cache *kv;
    int i, n_tables = 0, fail_at;
    cfg.model.rope.dim = DIM;
    REQUIRE(memory != NULL);
    kv = create_cache(&cfg);
    CHECK_EQ(append_to_all_layers(kv, 0, 1, 900, 100), TKV_OK);
    move_behind_borders(kv, 0, 40);
    attend_newest(kv, 0, want);
    CHECK_EQ(kv->turns.n, 40);
    tkv_destroy(kv);
    for (fail_at = 1; fail_at < 4; fail_at++) {
        counting_allocator p;
        tkv_config counted = cfg;
        counted.host.allocator = counting_allocator_of(&p);
        kv = create_cache(&counted);
        CHECK_EQ(append_to_all_layers(kv, 0, 1, 900, 100), TKV_OK);
        move_behind_borders(kv, 0, 39);
        tkvi_free_turns(&kv->turns, &kv->heap);
        p.fail_at = fail_at;
        CHECK_EQ(tkv_seq_shift(kv, 0, 10 + 20 * 39 + 3 * 39, TKV_UNLIMITED, 3), TKV_OK);
        p.fail_at = 0;
        n_tables += kv->turns.n == 40;
        attend_newest(kv, 0, out);
        CHECK_MEM(out, want, sizeof out);
        check_cache_at(kv, "allocation", fail_at);
        tkv_destroy(kv);
        CHECK_EQ(p.held, 0);
    }
    CHECK(n_tables < 3);
    cfg.limits.max_tokens = 1024;
    REQUIRE(tkv_create_in_place(&cfg, memory, BYTES, &kv, NULL, 0) == TKV_OK);
    last_config = kv->tables.cfg;
    CHECK_EQ(kv->turns.cap, 20);
    CHECK_EQ(append_to_all_layers(kv, 0, 1, 900, 100), TKV_OK);
    for (i = 0; i < 40; i++) (void)tkv_seq_shift(kv, 0, 10 + 20 * i + 3 * i, TKV_UNLIMITED, 3);
    CHECK_EQ(kv->turns.cap, 20);
    check_cache_at(kv, "in place", 0);
    tkv_destroy(kv);
    cfg.limits.max_tokens = 0;
    cfg.budget.bytes = 150000;
    kv = create_cache(&cfg);
    CHECK_EQ(append_to_all_layers(kv, 0, 1, 200, 100), TKV_OK);
    move_behind_borders(kv, 0, 5);
    CHECK(kv->turns.cap > 0);
    while (append_to_all_layers(kv, 0, 1, 50, 50) == TKV_OK) {
        check_cache_at(kv, "length", tkv_get_length(kv, 0, 0));
        attend_newest(kv, 0, out);
    }
    CHECK_EQ(kv->turns.cap, 0);
    attend_newest(kv, 0, out);
    check_cache_at(kv, "full", 0);
    tkv_destroy(kv);
    free(memory);
}

/* The pool gives nothing beyond its allowance of pages, nor entries that no index can number. */
TEST(demands_beyond_the_allowance) {
    enum { BYTES = 1 << 22 };
    tkv_config cfg = make_config(1, 1);
    uint8_t *memory = (uint8_t *)malloc(BYTES);
    tkvi_demand demand = tkvi_no_demand();
    tkv_cache *kv;
    int n_pages;
    if (!memory) exit(2);
    cfg.limits.max_tokens = 512;
    cfg.budget.bytes = BYTES;
    REQUIRE(tkv_create_in_place(&cfg, memory, BYTES, &kv, NULL, 0) == TKV_OK);
    n_pages = (int)kv->pool.n_pages;
    CHECK(n_pages > 0);
    CHECK_EQ(tkvi_provide(&kv->pool, &demand), 1);
    kv->pool.max_pages = (int)tkvi_pages_for_demand(&kv->pool, &demand);
    CHECK(kv->pool.max_pages > 0);
    CHECK_EQ(tkvi_provide(&kv->pool, &demand), 1);
    demand.slots[0] = 1 << 20;
    kv->pool.max_pages = n_pages;
    CHECK_EQ(tkvi_provide(&kv->pool, &demand), 0);
    demand = tkvi_no_demand();
    demand.entries = (int64_t)1 << 31;
    CHECK_EQ(tkvi_provide(&kv->pool, &demand), 0);
    CHECK_EQ((int)kv->pool.n_pages, n_pages);
    tkv_destroy(kv);
    free(memory);
}

/* A loaded cache may hold keys of KVQUANT that were coded again in a tier without a table: they read as zeros. */
TEST(keys_of_kvquant_without_a_table_are_zeros) {
    static float x[BLOCK * 64], y[BLOCK * 64];
    static uint8_t bytes[2 * BLOCK * 64];
    tkv_config cfg = make_config(1, 1);
    tkv_cache *kv;
    int i, c, found = 0;
    cfg.tiers.archive.k = TKV_KVQUANT3;
    cfg.tiers.archive.v = TKV_KVQUANT2;
    cfg.model.rope.dim = cfg.model.head_dim;
    kv = create_cache(&cfg);
    for (i = 0; i < kv->tables.n_keys; i++) {
        const tkvi_side k = kv->tables.layout[i].record[0].k;
        if (kv->tables.layout[i].pair.k != TKV_KVQUANT3) continue;
        REQUIRE(k.dim <= 64 && k.bytes <= sizeof bytes);
        CHECK(k.tabled && !k.head_state);
        for (c = 0; c < BLOCK * k.dim; c++) x[c] = y[c] = 1.0f + (float)(c % 7);
        tkvi_encode_side(&k, kv->kernels->simd_ops, x, (size_t)k.dim, BLOCK, bytes);
        tkvi_decode_side(&k, bytes, 0, BLOCK, y, (size_t)k.dim);
        for (c = 0; c < BLOCK * k.dim; c++) found += y[c] == 0.0f;
        CHECK_EQ(found, BLOCK * k.dim);
    }
    CHECK(found > 0);
    tkv_destroy(kv);
}

int main(int argc, char **argv) {
    tkv_test_begin(argc, argv);
    RUN(check_finds_damage);
    RUN(check_finds_damaged_anchors);
    RUN(check_names_damaged_counts);
    RUN(dead_rows_repeat_live_ones);
    RUN(check_names_damaged_entries);
    RUN(check_names_damaged_lists_of_indices);
    RUN(check_names_damaged_sinks);
    RUN(check_names_damaged_offloaded_blocks);
    RUN(check_names_a_damaged_meter);
    RUN(check_names_damaged_states);
    RUN(check_finds_pages_that_could_be_one);
    RUN(check_finds_a_lost_block);
    RUN(work_space_for_the_longest_list);
    RUN(most_pages_of_fixed_memory);
    RUN(pages_for_recoding);
    RUN(sums_of_small_and_large_floats);
    RUN(errors_of_the_meter_are_limited);
    RUN(check_survives_wild_indices);
    RUN(shared_blocks);
    RUN(shared_tail_and_shared_demotion);
    RUN(appends_allocate_pages_and_tables);
    RUN(page_waste_is_bounded);
    RUN(pages_do_not_fragment);
    RUN(rotations_are_kept_while_tokens_have_them);
    RUN(rotations_are_not_needed);
    RUN(memory_comes_back);
    RUN(memory_comes_back_after_random_histories);
    RUN(shrinking_keeps_the_rest);
    RUN(demands_beyond_the_allowance);
    RUN(keys_of_kvquant_without_a_table_are_zeros);
    return tkv_test_end();
}
