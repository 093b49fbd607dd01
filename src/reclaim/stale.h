/*
 * reclaim/stale.h - under a budget: which blocks the level recodes, and the recoding of the oldest of them.
 *
 * Recoding needs a free page for each block size that it writes. These pages (pool.recode_pages) are held from the
 * first append on, and only recoding uses them. A list stores how many of its blocks the level has recoded
 * (tkvi_list.passed).
 */
#ifndef TKVI_RECLAIM_STALE_H
#define TKVI_RECLAIM_STALE_H

#include "reclaim/demand.h"

/* >>stale blocks */
/* A stale block: the tier spec of the level demands a layout with fewer bytes for it. */
typedef struct tkvi_stale {
    int seq, layer, i, layout; /* layout: the smaller one */
    tkv_tier due, tier;        /* tier in the list; tier that the block is coded for, with all its holders */
} tkvi_stale;

/* The present layout of a stale block. */
static const tkvi_layout *tkvi_layout_at(const tkv_cache *kv, const tkvi_stale *s) {
    return &kv->tables.layout[tkvi_block_of(kv, tkvi_ids(kv, s->seq, s->layer)[s->i])->layout];
}

/* 1 if any sequence has an open step. */
static int tkvi_has_open_step(const tkv_cache *kv) {
    int seq, open = 0;
    for (seq = 0; seq < kv->tables.cfg.limits.max_seqs; seq++) open |= kv->seq[seq].in_step;
    return open;
}

/* The tier that a tier spec demands for a block of a list. TKV_TIER_HOT: the block must stay as it is. start, end:
 * its positions. is_last: 1 for the last block. can_learn: 1 if missing tables can be learned now. Otherwise blocks
 * wait for them. */
static tkv_tier tkvi_due_tier_of(const tkv_cache *kv, int seq, int layer, int start, int end, int is_last,
                                 const tkvi_tier_spec *spec, int can_learn) {
    const tkvi_list *list = tkvi_list_of(kv, seq, layer);
    tkv_tier due = tkvi_tier_by_age(spec, spec->hot, end, kv->seq[seq].in_step ? list->step_len : list->len);
    if (kv->call.recodes_young && spec->hot != TKVI_FOREVER)
        due = spec->warm == TKVI_FOREVER ? TKV_TIER_WARM : TKV_TIER_ARCHIVE;
    if (end > tkvi_exact_from(kv, seq, layer) || (is_last && end - start < TKVI_BLOCK)) return TKV_TIER_HOT;
    while (spec->needs_table[due] && kv->tables.current_version[layer] < 0 && !can_learn)
        due = due == TKV_TIER_ARCHIVE ? TKV_TIER_WARM : TKV_TIER_HOT;
    return due;
}

/* tkvi_due_tier_of for block i of a list. */
static tkv_tier tkvi_due_tier(const tkv_cache *kv, int seq, int layer, int i, const tkvi_tier_spec *spec,
                              int can_learn) {
    const tkvi_list *list = tkvi_list_of(kv, seq, layer);
    const uint32_t *ids = tkvi_ids(kv, seq, layer);
    return tkvi_due_tier_of(kv, seq, layer, tkvi_block_start(kv, ids, i), tkvi_block_end(kv, list, ids, i),
                            i + 1 == list->n, spec, can_learn);
}

/* Counts block i as recoded for the tier `due` of its list, and for the tier `coded` of its hottest holder. All blocks
 * before it are counted already. A late block (tkvi_is_late) was counted before. */
static void tkvi_count_recoded(tkv_cache *kv, tkvi_list *list, const uint32_t *ids, int i, tkv_tier due,
                               tkv_tier coded) {
    tkvi_enter_tier(kv, list, ids, i, due, coded);
    if (due == TKV_TIER_ARCHIVE && i == list->sinks + list->passed[TKVI_TIGHTEST])
        list->passed[TKVI_TIGHTEST]++;
    list->passed[TKVI_RECODED] = tkvi_max(list->passed[TKVI_RECODED], i + 1 - list->sinks);
}

/* Index of a late block of a list that need not wait for a table; -1: none. */
static int tkvi_find_late(const tkv_cache *kv, int seq, int layer, int can_learn) {
    const tkvi_list *list = tkvi_list_of(kv, seq, layer);
    const uint32_t *ids = tkvi_ids(kv, seq, layer);
    int i;
    for (i = list->sinks; kv->pool.n_late && i < list->n; i++)
        if (tkvi_is_late(&kv->pool, ids[i]) &&
            (can_learn || !tkvi_must_wait_for_table(kv, layer, tkvi_tier_for_all(&kv->pool, ids[i]))))
            return i;
    return -1;
}

/* Finds the oldest stale block of a list, first for the archive, then for warm. 0: there is none. Passed
 * blocks that are due but not stale count as recoded from now on. */
static int tkvi_find_stale_in(tkv_cache *kv, int seq, int layer, int can_learn, tkvi_stale *stale) {
    tkvi_list *list = tkvi_list_of(kv, seq, layer);
    const uint32_t *ids = tkvi_ids(kv, seq, layer);
    const tkvi_tier_spec *spec = &kv->tables.plan[layer].now;
    for (;;) {
        const int late = tkvi_find_late(kv, seq, layer, can_learn);
        int i = late < 0 ? list->sinks + list->passed[TKVI_TIGHTEST] : late;
        tkv_tier due = i < list->n ? tkvi_due_tier(kv, seq, layer, i, spec, can_learn) : TKV_TIER_HOT;
        const tkvi_block *b;
        if (late >= 0) {
            due = tkvi_tier_at(list, i);
        } else if (due != TKV_TIER_ARCHIVE) {
            i = list->sinks + list->passed[TKVI_RECODED];
            due = i < list->n ? tkvi_due_tier(kv, seq, layer, i, spec, can_learn) : TKV_TIER_HOT;
        }
        if (due == TKV_TIER_HOT) return 0;
        b = tkvi_block_of(kv, ids[i]);
        stale->tier = tkvi_hottest_tier(&kv->pool, ids[i], due);
        while (!can_learn && tkvi_must_wait_for_table(kv, layer, stale->tier))
            stale->tier = (tkv_tier)((int)stale->tier - 1);
        stale->layout = tkvi_layout_of(&kv->tables, layer, stale->tier);
        if (stale->tier != TKV_TIER_HOT && !tkvi_is_offloaded(b) &&
            tkvi_is_smaller(kv, b->layout, stale->layout)) {
            stale->seq = seq;
            stale->layer = layer;
            stale->i = i;
            stale->due = due;
            return 1;
        }
        tkvi_count_recoded(kv, list, ids, i, due, stale->tier);
    }
}

/* The slots that a recoded block may take: any; slots in pages that the pool holds; slots in partial pages of its
 * class. */
typedef enum tkvi_where { TKVI_ANYWHERE, TKVI_IN_FREE_PAGES, TKVI_IN_OPEN_PAGES } tkvi_where;

static int tkvi_can_take(const tkv_cache *kv, int layout, tkvi_where where) {
    const int size_class = kv->tables.layout[layout].size_class;
    if (where == TKVI_IN_FREE_PAGES) return tkvi_has_slot(&kv->pool, size_class);
    return where == TKVI_ANYWHERE || kv->pool.partial_pages[size_class] != TKVI_NIL;
}

/* Finds the oldest stale block of all lists that has a slot of the kind `where`. 0: there is none. learns: 1
 * includes blocks that wait for a table, because the table can be learned from the present blocks. */
static int tkvi_find_stale(tkv_cache *kv, tkvi_where where, int learns, tkvi_stale *oldest) {
    int seq, layer, found = 0, oldest_age = -1, can_learn = learns && !tkvi_has_open_step(kv);
    for (seq = 0; seq < kv->tables.cfg.limits.max_seqs; seq++)
        for (layer = 0; layer < kv->tables.cfg.model.n_layers; layer++) {
            const tkvi_list *list = tkvi_list_of(kv, seq, layer);
            tkvi_stale stale;
            int age;
            if (list->n == 0 || !tkvi_find_stale_in(kv, seq, layer, can_learn, &stale)) continue;
            age = list->len - tkvi_block_start(kv, tkvi_ids(kv, seq, layer), stale.i);
            if (age <= oldest_age || !tkvi_can_take(kv, stale.layout, where)) continue;
            oldest_age = age;
            *oldest = stale;
            found = 1;
        }
    return found;
}

/* Recodes the oldest stale block that has a slot. Returns the bytes freed; 0: no block can be recoded at this
 * level. limit, if not 0: the bytes that may be held. If a block would open a page beyond the limit, a block that
 * opens none is recoded instead. Such a page pays only if more blocks follow. learns: as in tkvi_find_stale. */
static size_t tkvi_recode_oldest(tkv_cache *kv, size_t limit, int learns) {
    tkvi_stale stale;
    size_t old_bytes;
    if (!tkvi_find_stale(kv, TKVI_IN_FREE_PAGES, learns, &stale)) return 0;
    if (limit && !tkvi_can_take(kv, stale.layout, TKVI_IN_OPEN_PAGES)) {
        const tkvi_request none = tkvi_no_request();
        tkvi_demand recoded = none.fixed;
        recoded.slots[tkvi_layout_at(kv, &stale)->size_class]--;
        recoded.slots[kv->tables.layout[stale.layout].size_class]++;
        if (tkvi_bytes_for_demand(kv, &none, &recoded) > limit &&
            !tkvi_find_stale(kv, TKVI_IN_OPEN_PAGES, learns, &stale))
            return 0;
    }
    old_bytes = tkvi_layout_at(kv, &stale)->bytes.total;
    if (tkvi_must_wait_for_table(kv, stale.layer, stale.tier)) {
        /* learns a table from the present blocks, because this block cannot wait */
        (void)tkvi_make_due_table(kv, stale.layer, TKVI_ANY_TOKENS);
        if (kv->tables.current_version[stale.layer] < 0) return 0;
        stale.layout = tkvi_layout_of(&kv->tables, stale.layer, stale.tier);
    }
    if (!tkvi_demote_block(kv, stale.seq, stale.layer, stale.i, stale.layout)) return 0;
    tkvi_count_recoded(kv, tkvi_list_of(kv, stale.seq, stale.layer), tkvi_ids(kv, stale.seq, stale.layer),
                       stale.i, stale.due, stale.tier);
    kv->counts.recoded[kv->tables.level]++;
    return old_bytes - kv->tables.layout[stale.layout].bytes.total;
}

#endif /* TKVI_RECLAIM_STALE_H */
