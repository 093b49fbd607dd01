/*
 * budget.h - a bound on everything that the cache holds: when bytes are needed, blocks get tighter, oldest first.
 *
 *     append -> does it fit, if everything old were at one of the levels?  no: TKV_ERR_BUDGET, nothing has changed
 *            -> above what the level allows: a block or as many as the new bytes require     (tkvi_keep_pace)
 *            -> still no room: as many as it takes, and the next level when this one is done; then, where the
 *               config has a place for them, the oldest blocks go outside, then what a model can compute
 *               again goes (absent.h), then tokens (drop.h)                                   (tkvi_make_room)
 *
 * Before an operation it is known on paper (tkvi_peak) what slots it takes; pages in use are exactly what the numbers
 * of blocks of each size ask for (pool.h), so whether it fits is arithmetic. Recoding needs a page for each size of
 * block that comes out of it: these spare pages are held from the first append on and used by nothing else. A list
 * remembers how many of its blocks are as tight as the level wants (tkvi_list.tight), so the next one is found by a
 * look at each list.
 *
 * A level is left for a tighter one when the average pressure asks for it and nothing is left to do at this one, or
 * when there is no room otherwise; for a looser one when the pressure fell and all that is held would fit there.
 * Blocks never get looser by that. May call age and below.
 */
#ifndef TKVI_BUDGET_H
#define TKVI_BUDGET_H

#include "absent.h"
#include "drop.h"

/* >>bytes */
/* All that is held, but free pages that nobody keeps. */
static size_t tkvi_in_use(const tkv_cache *kv) {
    const size_t spare = (size_t)kv->pool.spare, n_free = kv->pool.n_free_pages;
    return kv->heap.held - (n_free > spare ? n_free - spare : 0) * kv->tables.page_bytes;
}

/* All but pages. */
static size_t tkvi_rest(const tkv_cache *kv) {
    return kv->heap.held - (size_t)kv->pool.n_pages * kv->tables.page_bytes;
}

/* Memory that an array may take when it grows; the old one is given back, but not before. */
static size_t tkvi_growth(uint32_t cap, int64_t want, size_t item) {
    return want > (int64_t)cap ? (size_t)tkvi_cap_for(want) * item : 0;
}

/* Bytes held when there are so many slots of each class, room for recoding included. */
static size_t tkvi_bytes_with(const tkv_cache *kv, const int64_t *live, size_t extra) {
    int64_t pages = kv->pool.spare;
    size_t bytes;
    int c;
    for (c = 0; c < kv->tables.n_classes; c++)
        pages += tkvi_pages_for(&kv->tables.size_class[c], live[c] > 0 ? live[c] : 0);
    if (!tkvi_add(extra, tkvi_growth(kv->pool.page_cap, pages, sizeof(tkvi_page)), &extra)) return (size_t)-1;
    if ((uint64_t)pages > (size_t)-1 || !tkvi_mul((size_t)pages, kv->tables.page_bytes, &bytes) ||
        !tkvi_add(bytes, tkvi_rest(kv), &bytes) || !tkvi_add(bytes, extra, &bytes))
        return (size_t)-1;
    return bytes;
}

static size_t tkvi_list_growth(const tkv_cache *kv, int seq, int want) {
    return tkvi_growth(kv->seq[seq].cap, want, sizeof(uint32_t)) * (size_t)kv->tables.cfg.n_layers +
           tkvi_growth(kv->choice_cap, want, tkvi_choice_entry(&kv->tables.cfg));
}

static size_t tkvi_blocks_growth(const tkv_cache *kv, const tkvi_peak *paper) {
    return tkvi_growth(kv->pool.block_cap, paper->most_blocks, tkvi_block_entry(&kv->tables.cfg));
}

/* What an operation asks for, from its paper; what it gives back does not count. */
static void tkvi_need_of(tkv_cache *kv, const tkvi_peak *paper) {
    int c;
    for (c = 0; c < kv->tables.n_classes; c++) {
        const int64_t more = paper->live[c] - kv->pool.live[c] - kv->pool.promised[c];
        kv->need[c] = more > 0 ? more : 0;
    }
}

/* >>what is stored more loosely than a level wants it */
typedef struct tkvi_stale {
    int seq, layer, i, coding;
    tkv_tier due;
} tkvi_stale;

/* What it is coded in. */
static const tkvi_coding *tkvi_coding_at(const tkv_cache *kv, const tkvi_stale *s) {
    return &kv->tables.coding[kv->pool.block[tkvi_ids(kv, s->seq, s->layer)[s->i]].coding];
}

static int tkvi_any_step(const tkv_cache *kv) {
    int seq, any = 0;
    for (seq = 0; seq < kv->tables.cfg.max_seqs; seq++) any |= kv->seq[seq].in_step;
    return any;
}

/* Where block i of a list should be by rule r: TKV_HOT if it must stay. tables: those missing can be made. */
static tkv_tier tkvi_due(const tkv_cache *kv, int seq, int layer, int i, const tkvi_rule *r, int tables) {
    const tkvi_list *list = tkvi_list_of(kv, seq, layer);
    const uint32_t *ids = tkvi_ids(kv, seq, layer);
    int start = tkvi_block_start(kv, ids, i), end = tkvi_block_end(kv, list, ids, i);
    tkv_tier due = tkvi_tier_due(r, r->hot, end, kv->seq[seq].in_step ? list->step_len : list->len);
    if (end > list->chunk || (i + 1 == list->n && end - start < TKVI_BLOCK)) return TKV_HOT;
    while (r->shared[due] && kv->tables.current[layer] < 0 && !tables)
        due = due == TKV_ARCHIVE ? TKV_WARM : TKV_HOT;
    return due;
}

/* Block i, the first that is not yet seen to, is in its place: the tiers of a list are stretches of it. */
static void tkvi_in_place(tkvi_list *list, int i, tkv_tier due) {
    if (i >= list->sinks + list->archive + list->warm) list->warm++;
    if (due == TKV_ARCHIVE && i >= list->sinks + list->archive) {
        list->warm--;
        list->archive++;
    }
    if (due == TKV_ARCHIVE) list->tightest++;
    list->tight = tkvi_max(list->tight, i + 1 - list->sinks);
}

/* The oldest block of a list that the level wants tighter, first for the archive, then for warm. 0: there is none. */
static int tkvi_stale_in(tkv_cache *kv, int seq, int layer, int tables, tkvi_stale *s) {
    tkvi_list *list = tkvi_list_of(kv, seq, layer);
    const uint32_t *ids = tkvi_ids(kv, seq, layer);
    const tkvi_rule *r = &kv->tables.plan[layer].now;
    for (;;) {
        int i = list->sinks + list->tightest;
        tkv_tier due = i < list->n ? tkvi_due(kv, seq, layer, i, r, tables) : TKV_HOT;
        const tkvi_block *b;
        if (due != TKV_ARCHIVE) {
            i = list->sinks + list->tight;
            due = i < list->n ? tkvi_due(kv, seq, layer, i, r, tables) : TKV_HOT;
        }
        if (due == TKV_HOT) return 0;
        b = &kv->pool.block[ids[i]];
        s->coding = tkvi_coding_of(&kv->tables, layer, due);
        if (b->refs == 1 && !tkvi_spilled(b) && tkvi_tighter(kv, b->coding, s->coding)) {
            s->seq = seq;
            s->layer = layer;
            s->i = i;
            s->due = due;
            return 1;
        }
        tkvi_in_place(list, i, due);
    }
}

/* Where a block may go: anywhere, where no memory is asked for, where no page is opened either. */
typedef enum tkvi_where { TKVI_ANYWHERE, TKVI_IN_FREE_PAGES, TKVI_IN_OPEN_PAGES } tkvi_where;

static int tkvi_has_slot(const tkv_cache *kv, int coding, tkvi_where where) {
    if (where == TKVI_ANYWHERE || kv->pool.room[kv->tables.coding[coding].size_class] != TKVI_NIL) return 1;
    return where == TKVI_IN_FREE_PAGES && (int64_t)kv->pool.n_free_pages > tkvi_promised_pages(&kv->pool);
}

/* The oldest of all lists that has such a slot. */
static int tkvi_next_stale(tkv_cache *kv, tkvi_where where, tkvi_stale *oldest) {
    int seq, layer, found = 0, most = -1, tables = !tkvi_any_step(kv);
    for (seq = 0; seq < kv->tables.cfg.max_seqs; seq++)
        for (layer = 0; layer < kv->tables.cfg.n_layers; layer++) {
            const tkvi_list *list = tkvi_list_of(kv, seq, layer);
            tkvi_stale s;
            int age;
            if (list->n == 0 || !tkvi_stale_in(kv, seq, layer, tables, &s)) continue;
            age = list->len - tkvi_block_start(kv, tkvi_ids(kv, seq, layer), s.i);
            if (age <= most || !tkvi_has_slot(kv, s.coding, where)) continue;
            most = age;
            *oldest = s;
            found = 1;
        }
    return found;
}

static uint64_t tkvi_pending(const tkv_cache *kv) {
    uint64_t n = 0;
    int seq, layer, i, tables = !tkvi_any_step(kv);
    for (seq = 0; seq < kv->tables.cfg.max_seqs; seq++)
        for (layer = 0; layer < kv->tables.cfg.n_layers; layer++) {
            const tkvi_list *list = tkvi_list_of(kv, seq, layer);
            const uint32_t *ids = tkvi_ids(kv, seq, layer);
            for (i = list->sinks + list->tightest; i < list->n; i++) {
                tkv_tier due = tkvi_due(kv, seq, layer, i, &kv->tables.plan[layer].now, tables);
                const tkvi_block *b = &kv->pool.block[ids[i]];
                if (due == TKV_HOT) break;
                n += b->refs == 1 && !tkvi_spilled(b) &&
                     tkvi_tighter(kv, b->coding, tkvi_coding_of(&kv->tables, layer, due));
            }
        }
    return n;
}

/* An operation does not fit, at the last level either. */
static tkv_status tkvi_over_budget(tkv_cache *kv, size_t bytes) {
    tkv_status st = tkvi_fail(kv, TKV_ERR_BUDGET, "the tightest level would need", (int64_t)bytes,
                              " bytes, more than the budget; reset a sequence or raise it");
    if (kv->store_failed)
        st =
            tkvi_fail(kv, TKV_ERR_BUDGET, "cfg.spill.store failed, and without it there is no room", 0, NULL);
    kv->refused++;
    tkvi_tell(kv, TKV_EVENT_BUDGET, -1, -1, -1, bytes, kv->error);
    return st;
}

/* >>levels */
/* The oldest block of all lists that may go outside does. 0: there is none, or the store failed. */
static int tkvi_spill_oldest(tkv_cache *kv) {
    int seq, layer, most = -1, of_seq = 0, of_layer = 0;
    if (!kv->tables.cfg.spill.store || kv->store_failed) return 0;
    for (seq = 0; seq < kv->tables.cfg.max_seqs; seq++)
        for (layer = 0; layer < kv->tables.cfg.n_layers; layer++) {
            const int i = tkvi_next_out(kv, seq, layer);
            int age;
            if (i < 0) continue;
            age = tkvi_list_of(kv, seq, layer)->len - tkvi_block_start(kv, tkvi_ids(kv, seq, layer), i);
            if (age <= most) continue;
            most = age;
            of_seq = seq;
            of_layer = layer;
        }
    return most >= 0 && tkvi_spill_next(kv, of_seq, of_layer);
}

/* Another plan without a budget: what was reserved was counted by the old one. */
static void tkvi_end_promises(tkv_cache *kv) {
    const size_t n = (size_t)kv->tables.n_classes;
    int seq;
    memset(kv->promised, 0, (size_t)kv->tables.cfg.max_seqs * n * sizeof *kv->promised);
    memset(kv->pool.promised, 0, n * sizeof *kv->pool.promised);
    for (seq = 0; seq < kv->tables.cfg.max_seqs; seq++) kv->seq[seq].reserved_len = 0;
    tkvi_trim(&kv->pool);
}

/* The layers' plans become those of a level, or are read again: all blocks are to be looked at by them. */
static void tkvi_take_plans(tkv_cache *kv, int level) {
    size_t i, lists = (size_t)kv->tables.cfg.max_seqs * (size_t)kv->tables.cfg.n_layers;
    tkvi_take_level(&kv->tables, level);
    if (!tkvi_lazy(kv)) tkvi_end_promises(kv);
    for (i = 0; i < lists; i++) kv->list[i].tight = kv->list[i].tightest = 0;
}

static void tkvi_go_to_level(tkv_cache *kv, int level) {
    const int from = kv->tables.level;
    if (level == from) return;
    tkvi_take_plans(kv, level);
    kv->relax_at = (size_t)-1;
    tkvi_policy_move(&kv->policy.now, level);
    tkvi_tell(kv, TKV_EVENT_LEVEL, -1, from, level, tkvi_in_use(kv),
              level > from ? "memory is short: old tokens get tighter"
                           : "memory is free again: new tokens are looser");
}

/* Slots of each class, in need[n_classes ...]: those of now, with what is needed. */
static int64_t *tkvi_slots_now(tkv_cache *kv) {
    int64_t *slots = kv->need + kv->tables.n_classes;
    int c;
    for (c = 0; c < kv->tables.n_classes; c++)
        slots[c] = kv->pool.live[c] + kv->pool.promised[c] + kv->need[c];
    return slots;
}

/* The same with all blocks that are looser than this level wants them where it wants them; also without those that may
 * go outside or be recomputed, or that eviction would give back for sure; or with the tighter ones as large as
 * the level has them. */
typedef enum tkvi_fate {
    TKVI_TIGHTEN,
    TKVI_TIGHTEN_AND_SPILL,
    TKVI_TIGHTEN_AND_VACATE,
    TKVI_TIGHTEN_AND_EVICT,
    TKVI_LOOSEN
} tkvi_fate;

static const int64_t *tkvi_slots_at(tkv_cache *kv, int level, tkvi_fate fate) {
    const tkvi_tables *t = &kv->tables;
    int64_t *slots = tkvi_slots_now(kv);
    int seq, layer, i, tables = !tkvi_any_step(kv);
    for (seq = 0; seq < t->cfg.max_seqs; seq++) {
        const int vacant =
            fate == TKVI_TIGHTEN_AND_VACATE && tkvi_is_idle(kv, seq) ? tkvi_vacant_to(kv, seq, level) : 0;
        for (layer = 0; layer < t->cfg.n_layers; layer++) {
            const tkvi_list *list = tkvi_list_of(kv, seq, layer);
            const uint32_t *ids = tkvi_ids(kv, seq, layer);
            const tkvi_rule *r = &tkvi_rules_of(t, layer)[level];
            int go = fate == TKVI_TIGHTEN_AND_EVICT ? tkvi_may_go(kv, seq, layer) : 0;
            for (i = list->sinks + list->out; i < list->n; i++) {
                const tkvi_block *b = &kv->pool.block[ids[i]];
                tkv_tier due = tkvi_due(kv, seq, layer, i, r, tables);
                int coding = r->coding[due];
                if (b->refs > 1 || tkvi_spilled(b)) continue;
                if (go > 0 || tkvi_block_end(kv, list, ids, i) <= vacant ||
                    (fate == TKVI_TIGHTEN_AND_SPILL && tkvi_may_spill(kv, seq, layer, i, r))) {
                    slots[t->coding[b->coding].size_class]--;
                    go--;
                    continue;
                }
                if (due == TKV_HOT && fate != TKVI_LOOSEN) break;
                if (fate == TKVI_LOOSEN ? !tkvi_tighter(kv, coding, b->coding)
                                        : !tkvi_tighter(kv, b->coding, coding))
                    continue;
                slots[t->coding[b->coding].size_class]--;
                slots[t->coding[coding].size_class]++;
            }
        }
    }
    return slots;
}

/* Would what is needed (kv->need) fit, as it is or at a level that the policy allows? More kinds of blocks have more
 * pages that are not full, so that it need not be the last. *bytes: the least that it takes. */
static int tkvi_fits_somewhere(tkv_cache *kv, size_t extra, size_t budget, size_t *bytes) {
    const int last = kv->policy.cfg.max_level;
    int level;
    kv->store_failed = 0;
    *bytes = tkvi_bytes_with(kv, tkvi_slots_now(kv), extra);
    for (level = kv->tables.level; *bytes > budget && level <= last; level++) {
        const size_t then = tkvi_bytes_with(kv, tkvi_slots_at(kv, level, TKVI_TIGHTEN), extra);
        *bytes = then < *bytes ? then : *bytes;
    }
    if (*bytes > budget && kv->tables.cfg.spill.store) { /* the last level, and the next resorts */
        const size_t then = tkvi_bytes_with(kv, tkvi_slots_at(kv, last, TKVI_TIGHTEN_AND_SPILL), extra);
        *bytes = then < *bytes ? then : *bytes;
    }
    if (*bytes > budget && kv->tables.cfg.remat) {
        const size_t then = tkvi_bytes_with(kv, tkvi_slots_at(kv, last, TKVI_TIGHTEN_AND_VACATE), extra);
        *bytes = then < *bytes ? then : *bytes;
    }
    if (*bytes > budget && kv->tables.cfg.evict.kind) {
        const size_t then = tkvi_bytes_with(kv, tkvi_slots_at(kv, last, TKVI_TIGHTEN_AND_EVICT), extra);
        *bytes = then < *bytes ? then : *bytes;
    }
    return *bytes <= budget;
}

/* >>work */
/* The oldest block that there is a slot for gets as tight as the level wants it. Returns the bytes won; 0: nothing
 * is to be done at this level. `within`, if not 0: not where the first block of its size would open a page for which
 * there is no room beside what is needed. Others would close pages in turn, but there may be no others. */
static size_t tkvi_tighten_one(tkv_cache *kv, size_t extra, size_t within) {
    tkvi_stale s;
    size_t had;
    const int spare = kv->pool.spare;
    if (!tkvi_next_stale(kv, TKVI_IN_FREE_PAGES, &s)) return 0;
    if (within && !tkvi_has_slot(kv, s.coding, TKVI_IN_OPEN_PAGES)) {
        int64_t *now = tkvi_slots_now(kv);
        now[tkvi_coding_at(kv, &s)->size_class]--;
        now[kv->tables.coding[s.coding].size_class]++;
        if (tkvi_bytes_with(kv, now, extra) > within && !tkvi_next_stale(kv, TKVI_IN_OPEN_PAGES, &s))
            return 0;
    }
    had = tkvi_coding_at(kv, &s)->bytes.total;
    if (kv->tables.plan[s.layer].now.shared[s.due] && kv->tables.current[s.layer] < 0) {
        int8_t before; /* a table of what there is: it must get tighter now */
        if (!tkvi_learn_begin(kv, s.layer, 1, &before) || kv->tables.current[s.layer] < 0) return 0;
        tkvi_learn_end(kv, s.layer, before, 1);
        s.coding = tkvi_coding_of(&kv->tables, s.layer, s.due);
    }
    kv->pool.spare = 0;
    tkvi_demote(kv, s.seq, s.layer, s.i, s.coding, NULL);
    kv->pool.spare = spare;
    tkvi_in_place(tkvi_list_of(kv, s.seq, s.layer), s.i, s.due);
    kv->recoded[kv->tables.level]++;
    return had - kv->tables.coding[s.coding].bytes.total;
}

/* What a level allows before the next one begins: its threshold of the budget, and room for the blocks that all layers
 * of a sequence open at the same token. At level 0 nothing is to be done. */
static size_t tkvi_soft_limit(const tkv_cache *kv, int level) {
    const size_t budget = kv->tables.cfg.budget_bytes, lump = kv->lump + kv->lump / 4;
    size_t soft;
    if (level == 0) return (size_t)-1;
    soft = kv->policy.cfg.threshold[level - 1] < 1.0f
               ? (size_t)((double)budget * (double)kv->policy.cfg.threshold[level - 1])
               : budget;
    return budget > lump && budget - lump < soft ? budget - lump : soft;
}

/* Would all that is held fit at the level before, with the threshold less the hysteresis to spare, and far enough from
 * where the next blocks would bring this level back? */
static int tkvi_may_relax(tkv_cache *kv) {
    const int level = kv->tables.level;
    const tkv_policy_config *p = &kv->policy.cfg;
    const double budget = (double)kv->tables.cfg.budget_bytes;
    double bytes;
    if (tkvi_in_use(kv) >= kv->relax_at) return 0;
    bytes = (double)tkvi_bytes_with(kv, tkvi_slots_at(kv, level - 1, TKVI_LOOSEN), 0);
    if (bytes < budget * (double)(p->threshold[level - 1] - p->hysteresis) &&
        bytes + 3.0 * (double)kv->lump < budget)
        return 1;
    kv->relax_at = tkvi_in_use(kv) - tkvi_in_use(kv) / 16; /* to find out takes a walk over all blocks */
    return 0;
}

/* Does a layer still have to learn a table that some level wants? */
static int tkvi_lacks_tables(const tkv_cache *kv) {
    int i, lacks = 0;
    for (i = 0; i < kv->tables.cfg.n_layers; i++)
        lacks |= kv->tables.plan[i].stored == i && tkvi_plan_learns(&kv->tables.plan[i]) &&
                 kv->tables.current[i] < 0;
    return lacks;
}

/* In a step no table is made. Where bytes get short, those that are missing are made before it begins. */
static void tkvi_learn_early(tkv_cache *kv) {
    int i;
    if (!tkvi_lazy(kv) || !tkvi_lacks_tables(kv) || tkvi_any_step(kv)) return;
    if (tkvi_in_use(kv) + 2 * kv->lump < tkvi_soft_limit(kv, kv->tables.level ? kv->tables.level : 1)) return;
    for (i = 0; i < kv->tables.cfg.n_layers; i++) {
        const tkvi_plan *p = &kv->tables.plan[i];
        int8_t had;
        if (p->stored != i || !tkvi_plan_learns(p) || kv->tables.current[i] >= 0) continue;
        if (tkvi_learn_begin(kv, i, 1, &had)) tkvi_learn_end(kv, i, had, 1);
    }
}

/* With each append: the average moves, the level may; and while more is held than the level allows, blocks get
 * tighter, as many as the new bytes require and half of that, so that the work is spread over the tokens. */
static void tkvi_keep_pace(tkv_cache *kv, size_t new_bytes, size_t extra) {
    const tkv_policy_config *p = &kv->policy.cfg;
    const float own = (float)((double)tkvi_in_use(kv) / (double)kv->tables.cfg.budget_bytes);
    float outside;
    int level = kv->tables.level, target;
    tkvi_stale s;
    tkvi_lock(&kv->policy.lock);
    outside = kv->outside;
    tkvi_unlock(&kv->policy.lock);
    target = tkvi_policy_sample(&kv->policy, own > outside ? own : outside, level);
    if (target < level && tkvi_may_relax(kv)) tkvi_go_to_level(kv, level - 1);
    level = kv->tables.level;
    kv->debt += (int64_t)(new_bytes + new_bytes / 2);
    if (kv->debt > 0 && level < p->max_level && !(tkvi_any_step(kv) && tkvi_lacks_tables(kv)) &&
        (target > level || tkvi_in_use(kv) + kv->lump > kv->tables.cfg.budget_bytes) &&
        !tkvi_next_stale(kv, TKVI_ANYWHERE, &s))
        tkvi_go_to_level(kv, ++level);
    while (kv->debt > 0) {
        size_t won = 0;
        if (level > 0 && (tkvi_in_use(kv) > tkvi_soft_limit(kv, level) || outside > p->threshold[level - 1]))
            won = tkvi_tighten_one(kv, extra, kv->tables.cfg.budget_bytes);
        kv->debt -= (int64_t)won;
        if (won) continue;
        kv->debt =
            -(int64_t)(kv->lump / 64); /* to look for it takes a walk over all lists: not with each append */
    }
}

/* Room for what is needed (kv->need) and `extra` bytes of index; tkvi_fits_somewhere must have said yes. */
static int tkvi_make_room(tkv_cache *kv, size_t extra, size_t budget) {
    for (;;) {
        if (tkvi_bytes_with(kv, tkvi_slots_now(kv), extra) <= budget) {
            if (kv->heap.held > budget || extra > budget - kv->heap.held)
                tkvi_trim_to(&kv->pool, 0); /* the index needs what pages have left */
            return 1;
        }
        if (tkvi_tighten_one(kv, extra, 0)) continue;
        if (kv->tables.level < kv->policy.cfg.max_level) tkvi_go_to_level(kv, kv->tables.level + 1);
        else if (!tkvi_spill_oldest(kv) && !tkvi_vacate_idle(kv) && !tkvi_evict_some(kv)) return 0;
    }
}

/* >>public */
TKV_API tkv_status tkv_budget(const tkv_cache *kv, tkv_budget_info *out) {
    int i;
    if (!kv || !out) return TKV_ERR_ARG;
    memset(out, 0, sizeof *out);
    out->budget = kv->tables.cfg.budget_bytes;
    out->used = tkvi_in_use(kv);
    out->peak = kv->heap.peak;
    out->level = kv->tables.level;
    out->n_levels = kv->tables.n_levels;
    out->policy = kv->policy.now;
    for (i = 0; i < TKV_MAX_LEVELS; i++) out->recoded[i] = kv->recoded[i];
    out->demoted = kv->demoted;
    out->refused = kv->refused;
    out->spilled = kv->spilled;
    out->unstored = kv->unstored;
    out->promoted = kv->promoted;
    out->dropped = kv->vacated;
    out->recomputed = kv->recomputed;
    out->evicted = kv->evicted;
    out->pending = tkvi_lazy(kv) ? tkvi_pending(kv) : 0;
    return TKV_OK;
}

TKV_API tkv_status tkv_set_budget(tkv_cache *kv, size_t bytes) {
    const int n = kv ? kv->tables.n_classes : 0;
    const size_t had = kv ? kv->tables.cfg.budget_bytes : 0;
    size_t takes;
    if (!kv) return TKV_ERR_ARG;
    if (!kv->tables.spare)
        return tkvi_fail(kv, TKV_ERR_ARG, "the cache was created without a budget", 0, NULL);
    if (kv->pool.keep_all && bytes == 0)
        return tkvi_fail(kv, TKV_ERR_ARG, "in place the budget is the memory that was given", 0, NULL);
    if (kv->pool.keep_all && bytes > kv->heap.held) bytes = kv->heap.held;
    if (bytes == 0) {
        kv->tables.cfg.budget_bytes = kv->heap.limit = 0;
        tkvi_end_promises(kv);
        kv->pool.spare = 0;
        kv->pool.cushion = 0;
        tkvi_trim(&kv->pool);
        return tkvi_ok(kv);
    }
    memset(kv->need, 0, (size_t)n * sizeof *kv->need);
    kv->clock++;
    if (kv->pool.spare == 0) { /* there was none for a while: recoding needs its pages */
        tkvi_peak paper = tkvi_paper(kv);
        kv->pool.spare = kv->tables.spare;
        if (!tkvi_peak_ready(&kv->pool, &paper)) {
            kv->pool.spare = 0;
            return tkvi_fail(kv, TKV_ERR_NOMEM, "the allocator gave no memory for recoding", 0, NULL);
        }
    }
    if (!tkvi_fits_somewhere(kv, 0, bytes, &takes)) {
        if (!had) kv->pool.spare = 0;
        tkvi_trim(&kv->pool);
        return tkvi_over_budget(kv, takes);
    }
    kv->tables.cfg.budget_bytes = bytes;
    if (!tkvi_make_room(kv, 0, bytes)) {
        kv->tables.cfg.budget_bytes = had;
        if (!had) kv->pool.spare = 0;
        return tkvi_over_budget(kv, takes);
    }
    if (!had) tkvi_end_promises(kv); /* they were for ages */
    tkvi_trim(&kv->pool);
    if (kv->pool.keep_all) /* the rest of what is held does not change */
        kv->pool.allowed = (int64_t)((bytes - tkvi_rest(kv)) / kv->tables.page_bytes);
    else kv->heap.limit = bytes;
    kv->pool.cushion = tkvi_cushion(kv);
    kv->relax_at = (size_t)-1;
    return tkvi_ok(kv);
}

TKV_API tkv_status tkv_set_level(tkv_cache *kv, int level) {
    if (!kv) return TKV_ERR_ARG;
    if (level < kv->policy.cfg.min_level || level > kv->policy.cfg.max_level)
        return tkvi_fail(kv, TKV_ERR_ARG, "there is no level", level, " within cfg.policy");
    if (kv->pool.keep_all && !tkvi_lazy(kv))
        return tkvi_fail(kv, TKV_ERR_ARG, "in place and without a budget the plan is fixed", 0, NULL);
    tkvi_go_to_level(kv, level);
    return tkvi_ok(kv);
}

TKV_API tkv_status tkv_set_hot_tokens(tkv_cache *kv, int hot_tokens) {
    size_t i, n;
    if (!kv) return TKV_ERR_ARG;
    if (hot_tokens < 1 || hot_tokens >= TKVI_FOREVER)
        return tkvi_fail(kv, TKV_ERR_ARG, "hot_tokens is", hot_tokens, "; it must be 1 to 2^30 - 2");
    if (kv->pool.keep_all && !tkvi_lazy(kv))
        return tkvi_fail(kv, TKV_ERR_ARG, "in place and without a budget lengths are fixed", 0, NULL);
    n = (size_t)kv->tables.cfg.n_layers * (size_t)kv->tables.n_levels;
    for (i = 0; i < n; i++)
        if (kv->tables.rule[i].hot != TKVI_FOREVER) kv->tables.rule[i].hot = hot_tokens;
    tkvi_take_plans(kv, kv->tables.level);
    kv->moved = 1;
    return tkvi_ok(kv);
}

TKV_API tkv_status tkv_maintain(tkv_cache *kv, int max_work, int *done) {
    int n = 0;
    if (!kv || max_work < 0) return TKV_ERR_ARG;
    memset(kv->need, 0, (size_t)kv->tables.n_classes * sizeof *kv->need);
    while (tkvi_lazy(kv) && kv->tables.level > 0 && n < max_work &&
           tkvi_in_use(kv) > tkvi_soft_limit(kv, kv->tables.level) / 10 * 9 &&
           tkvi_tighten_one(kv, 0, kv->tables.cfg.budget_bytes))
        n++;
    tkvi_trim(&kv->pool);
    if (done) *done = n;
    return tkvi_ok(kv);
}

TKV_API tkv_status tkv_observe(tkv_cache *kv, float pressure) {
    if (!kv || !tkvi_is_finite(pressure)) return TKV_ERR_ARG;
    tkvi_lock(&kv->policy.lock);
    kv->outside = tkvi_clampf(pressure, 0.0f, 1.0f);
    tkvi_unlock(&kv->policy.lock);
    return TKV_OK;
}

#endif /* TKVI_BUDGET_H */
