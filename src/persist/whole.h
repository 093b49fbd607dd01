/*
 * persist/whole.h - the numbers of a whole cache that no list, table or record holds: the budget's controller and
 * backlog, statistics in progress, heads that were learned ahead, the meter, and the sizes of arrays, which count in a
 * budget. With them a loaded cache codes all later tokens as the saved one would have.
 *
 * One function visits them all, in one order. It runs in four modes:
 *
 *     saves      emits each number
 *     checks     reads each number, and compares it with its least and most value; nothing changes
 *     provides   reads again, takes the limits of the budget, and allocates arrays of the saved sizes
 *     stores     reads again, into the cache; cannot fail
 *
 * A whole cache is loaded into a new one of the same config. Numbers that follow from the config are compared.
 */
#ifndef TKVI_PERSIST_WHOLE_H
#define TKVI_PERSIST_WHOLE_H

#include "persist/saved.h"
#include "reclaim/demand.h"

typedef enum tkvi_number_mode {
    TKVI_SAVES_NUMBERS,
    TKVI_CHECKS_NUMBERS,
    TKVI_PROVIDES_NUMBERS,
    TKVI_STORES_NUMBERS
} tkvi_number_mode;

typedef struct tkvi_numbers {
    tkv_cache *kv;
    tkvi_number_mode mode;
    void (*emit)(void *saver, const void *bytes, size_t n);
    void *saver;
    uint8_t *room;           /* to save: of the largest block */
    const uint8_t *at, *end; /* bytes to read */
    int is_wrong;            /* 1: a number is out of its range, or missing */
    int is_other;            /* 1: a number that follows from the config differs here */
    const char *other;       /* NULL, or the sentence on it */
    int lacks_memory;        /* 1: an array could not be allocated */
    int64_t most_entries;    /* the longest array that a file may ask for, without reservations */
    int64_t n_reserved;      /* blocks that reservations may need, at most */
    int n_pages;             /* pages of the saved cache */
    unsigned versions;       /* mask of the versions of tables that it had memory for */
} tkvi_numbers;

/* Where an entry of the cache is saved. */
typedef struct tkvi_save_place {
    tkvi_saved_holder holder;
    uint32_t first, has_first; /* first: the first entry with its block */
    uint64_t slots;            /* of a first entry: those in which some list has a token */
} tkvi_save_place;

#define TKVI_MOST_COUNT (((int64_t)1 << 62) - 1)

/* >>kinds of numbers */
static void tkvi_visit_bytes(tkvi_numbers *io, void *bytes, size_t n) {
    if (io->mode == TKVI_SAVES_NUMBERS) {
        io->emit(io->saver, bytes, n);
        return;
    }
    if ((size_t)(io->end - io->at) < n) {
        io->is_wrong = 1;
        return;
    }
    if (io->mode == TKVI_STORES_NUMBERS) memcpy(bytes, io->at, n);
    io->at += n;
}

/* Saves x, or reads a number. One that is wrong counts as `least`. */
static int64_t tkvi_visit_number(tkvi_numbers *io, int64_t x, int64_t least, int64_t most) {
    uint8_t at[8];
    uint64_t read;
    int64_t y;
    if (io->mode == TKVI_SAVES_NUMBERS) {
        tkvi_store64(at, (uint64_t)x);
        io->emit(io->saver, at, sizeof at);
        return x;
    }
    if (io->end - io->at < 8) {
        io->is_wrong = 1;
        return least;
    }
    read = tkvi_load64(io->at);
    io->at += 8;
    y = read >> 63 ? -(int64_t)(~read) - 1 : (int64_t)read;
    if (y >= least && y <= most) return y;
    io->is_wrong = 1;
    return least;
}

static int tkvi_visit_int(tkvi_numbers *io, int *x, int least, int most) {
    const int y = (int)tkvi_visit_number(io, *x, least, most);
    if (io->mode == TKVI_STORES_NUMBERS) *x = y;
    return y;
}

static uint32_t tkvi_visit_u32(tkvi_numbers *io, uint32_t *x, uint32_t most) {
    const uint32_t y = (uint32_t)tkvi_visit_number(io, *x, 0, most);
    if (io->mode == TKVI_STORES_NUMBERS) *x = y;
    return y;
}

static int64_t tkvi_visit_i64(tkvi_numbers *io, int64_t *x, int64_t least, int64_t most) {
    const int64_t y = tkvi_visit_number(io, *x, least, most);
    if (io->mode == TKVI_STORES_NUMBERS) *x = y;
    return y;
}

static void tkvi_visit_count(tkvi_numbers *io, uint64_t *x) {
    const int64_t most = TKVI_MOST_COUNT,
                  y = tkvi_visit_number(io, *x < (uint64_t)most ? (int64_t)*x : most, 0, most);
    if (io->mode == TKVI_STORES_NUMBERS) *x = (uint64_t)y;
}

/* A number of bytes. Those that no size_t here has count as the largest size_t. */
static size_t tkvi_visit_size(tkvi_numbers *io, size_t *x) {
    uint64_t y = *x == (size_t)-1 ? (uint64_t)TKVI_MOST_COUNT : (uint64_t)*x;
    size_t size;
    y = (uint64_t)tkvi_visit_number(io, y < (uint64_t)TKVI_MOST_COUNT ? (int64_t)y : TKVI_MOST_COUNT, 0,
                                    TKVI_MOST_COUNT);
    size = y >= (uint64_t)TKVI_MOST_COUNT || y > (uint64_t)(size_t)-1 ? (size_t)-1 : (size_t)y;
    if (io->mode == TKVI_STORES_NUMBERS) *x = size;
    return size;
}

static void tkvi_visit_float(tkvi_numbers *io, float *x) {
    const float y = tkvi_from_bits((uint32_t)tkvi_visit_number(io, tkvi_bits(*x), 0, 0xffffffff));
    if (!tkvi_is_finite(y)) io->is_wrong = 1;
    if (io->mode == TKVI_STORES_NUMBERS) *x = y;
}

/* A number that follows from the config. */
static void tkvi_visit_same(tkvi_numbers *io, int64_t x) {
    if (tkvi_visit_number(io, x, -TKVI_MOST_COUNT, TKVI_MOST_COUNT) != x) io->is_other = 1;
}

/* The same, with a sentence for what no field of the config says alone. */
static void tkvi_visit_same_or(tkvi_numbers *io, int64_t x, const char *sentence) {
    const int was_other = io->is_other;
    tkvi_visit_same(io, x);
    if (io->is_other && !was_other) io->other = sentence;
}

static void tkvi_provide_saved(tkvi_numbers *io, int is_provided) {
    if (!is_provided) io->lacks_memory = 1;
}

/* >>what follows from the config */
static void tkvi_visit_config(tkvi_numbers *io) {
    const tkv_cache *kv = io->kv;
    const tkvi_tables *t = &kv->tables;
    const tkv_pressure_config *pressure = &kv->budget.pressure.cfg;
    const tkv_evict_config *evict = &t->cfg.evict;
    const tkv_importance_config *importance = &t->cfg.importance;
    int layer, level, i;
    tkvi_visit_same(io, t->cfg.limits.max_seqs);
    tkvi_visit_same(io, t->cfg.limits.max_tokens);
    tkvi_visit_same(io, t->cfg.limits.max_append);
    tkvi_visit_same(io, t->cfg.limits.max_states);
    tkvi_visit_same_or(io, kv->pool.keep_all,
                       kv->pool.keep_all ? "this cache is in place, and the saved one was not"
                                         : "the saved cache was in place, and this one is not");
    tkvi_visit_same(io, t->recode_pages);
    tkvi_visit_same(io, t->n_levels);
    tkvi_visit_same(io, t->n_keys);
    tkvi_visit_same(io, t->n_layouts);
    tkvi_visit_same(io, t->n_classes);
    tkvi_visit_same(io, t->any_shared);
    tkvi_visit_same(io, (int64_t)t->page_bytes);
    tkvi_visit_same(io, (int64_t)t->end.channels);
    tkvi_visit_same(io, (int64_t)t->end.heads);
    tkvi_visit_same(io, (int64_t)t->end.products);
    tkvi_visit_same(io, (int64_t)t->end.query_states);
    tkvi_visit_same(io, t->cfg.evict.policy);
    tkvi_visit_same(io, evict->keep_tokens);
    tkvi_visit_same(io, evict->keep_first);
    tkvi_visit_same(io, evict->keep_last);
    tkvi_visit_same(io, evict->sink_tokens);
    tkvi_visit_same(io, evict->recent_tokens);
    tkvi_visit_same(io, evict->pool);
    tkvi_visit_same(io, evict->seed);
    tkvi_visit_same(io, tkvi_bits(evict->trigger));
    tkvi_visit_same(io, evict->batch);
    tkvi_visit_same(io, importance->strategy);
    tkvi_visit_same(io, tkvi_bits(importance->decay));
    tkvi_visit_same(io, tkvi_bits(importance->attention));
    tkvi_visit_same(io, tkvi_bits(importance->recency));
    tkvi_visit_same(io, tkvi_bits(importance->tau));
    tkvi_visit_same(io, tkvi_bits(importance->low));
    tkvi_visit_same(io, importance->heads);
    tkvi_visit_same(io, importance->sample_every);
    tkvi_visit_same(io, t->cfg.promotion.every);
    tkvi_visit_same(io, t->cfg.promotion.per_step);
    tkvi_visit_same(io, t->cfg.promotion.cooldown);
    tkvi_visit_same(io, tkvi_bits(t->cfg.promotion.threshold));
    tkvi_visit_same(io, tkvi_bits(t->cfg.model.scale));
    tkvi_visit_same(io, t->cfg.host.nonfinite);
    tkvi_visit_same(io, t->cfg.host.precise);
    tkvi_visit_same(io, (int64_t)(t->cfg.limits.state_bytes / 2));
    tkvi_visit_same(io, pressure->jump);
    tkvi_visit_same_or(io, kv->meter ? kv->meter->n : 0,
                       "the saved config has another meter.heads; a build without atomics or with "
                       "TKV_NO_METER has no meter");
    tkvi_visit_same(io, kv->meter ? kv->meter->slots : 0);
    tkvi_visit_same(io, kv->meter ? kv->meter->every : 0);
    tkvi_visit_same(io, kv->meter && kv->meter->feedback);
    tkvi_visit_same(io, pressure->min_level);
    tkvi_visit_same(io, pressure->max_level);
    tkvi_visit_same(io, tkvi_bits(pressure->alpha));
    tkvi_visit_same(io, tkvi_bits(pressure->hysteresis));
    for (i = 0; i < TKV_MAX_LEVELS - 1; i++) tkvi_visit_same(io, tkvi_bits(pressure->threshold[i]));
    for (layer = 0; layer < t->cfg.model.n_layers; layer++) {
        tkvi_visit_same(io, t->plan[layer].sink);
        tkvi_visit_same(io, t->plan[layer].window);
        tkvi_visit_same(io, t->plan[layer].keeps_sinks);
        for (level = 0; level < t->n_levels; level++) {
            const tkvi_tier_spec *spec = &tkvi_tier_specs_of(t, layer)[level];
            tkvi_visit_same(io, spec->warm);
            for (i = 0; i < TKV_TIER_COUNT; i++) tkvi_visit_same(io, spec->layout[i]);
        }
    }
}

/* What files of e1db1b6 and before do not have. It comes last, and they end before it. */
static void tkvi_visit_rest_of_config(tkvi_numbers *io) {
    const tkvi_tables *t = &io->kv->tables;
    int layer, level, tier;
    if (io->mode != TKVI_SAVES_NUMBERS && io->at == io->end) return;
    tkvi_visit_same(io, (int64_t)(t->cfg.limits.state_bytes % 2));
    tkvi_visit_same(io, t->cfg.budget.discard);
    tkvi_visit_same(io, t->cfg.budget.adapt);
    tkvi_visit_same(io, t->cfg.tiers.n_anchors);
    tkvi_visit_same(io, tkvi_bits(t->cfg.meter.target));
    for (level = 0; level < t->n_levels; level++) tkvi_visit_same(io, t->from_tokens[level]);
    for (layer = 0; layer < t->cfg.model.n_layers; layer++) {
        tkvi_visit_same(io, t->plan[layer].geometry.n_heads);
        tkvi_visit_same(io, t->plan[layer].sees_sinks);
        for (level = 0; level < t->n_levels; level++)
            for (tier = 0; tier < TKV_TIER_COUNT; tier++) {
                const tkvi_tier_spec *spec = &tkvi_tier_specs_of(t, layer)[level];
                tkvi_visit_same(io, (int64_t)t->layout[spec->layout[tier]].pair.k);
                tkvi_visit_same(io, (int64_t)t->layout[spec->layout[tier]].pair.v);
            }
    }
}

/* >>budget */
static void tkvi_visit_budget(tkvi_numbers *io) {
    tkv_cache *kv = io->kv;
    tkvi_tables *t = &kv->tables;
    tkvi_budget_state *b = &kv->budget;
    tkv_pressure_info *now = &b->pressure.now;
    size_t bytes, without_pages;
    int layer, level, has_max_pages;
    level = tkvi_visit_int(io, &t->level, 0, t->n_levels - 1);
    for (layer = 0; layer < t->cfg.model.n_layers; layer++) {
        int l;
        for (l = 0; l < t->n_levels; l++) {
            int *hot = &tkvi_tier_specs_of(t, layer)[l].hot;
            const int is_forever = *hot == TKVI_FOREVER; /* no call changes it: tables depend on it */
            const int there = tkvi_visit_int(io, hot, 0, TKVI_FOREVER);
            if (is_forever != (there == TKVI_FOREVER)) io->is_other = 1;
        }
    }
    if (io->mode == TKVI_STORES_NUMBERS) tkvi_take_level(t, level);
    tkvi_visit_int(io, &now->level, 0, t->n_levels - 1);
    tkvi_visit_float(io, &now->average);
    tkvi_visit_float(io, &now->last);
    tkvi_visit_float(io, &now->peak);
    tkvi_visit_float(io, &now->trend);
    tkvi_visit_float(io, &now->samples_left);
    tkvi_visit_count(io, &now->samples);
    tkvi_visit_count(io, &now->refused);
    tkvi_visit_count(io, &now->tightened);
    tkvi_visit_count(io, &now->relaxed);
    tkvi_visit_float(io, &b->reported_pressure);
    tkvi_visit_i64(io, &b->recode_backlog, -TKVI_MOST_COUNT, TKVI_MOST_COUNT);
    tkvi_visit_size(io, &b->relax_at);
    tkvi_visit_int(io, &b->length_level, 0, t->n_levels - 1);
    tkvi_visit_int(io, &b->hot_tokens_changed, 0, 1);
    bytes = tkvi_visit_size(io, &t->cfg.budget.bytes);
    without_pages = tkvi_bytes_without_pages(kv);
    if (!t->recode_pages
            ? bytes != 0
            : kv->pool.keep_all && (bytes < without_pages + t->page_bytes || bytes > kv->heap.held))
        io->is_wrong = 1;
    has_max_pages = (int)tkvi_visit_number(io, kv->pool.max_pages > 0, 0, kv->pool.keep_all && bytes);
    if (io->mode != TKVI_PROVIDES_NUMBERS) return;
    /* as tkv_set_budget does */
    if (!kv->pool.keep_all) kv->heap.limit = bytes;
    kv->pool.recode_pages = bytes ? t->recode_pages : 0;
    kv->pool.kept_free_pages = bytes ? tkvi_free_pages_to_keep(kv) : 0;
    if (has_max_pages) kv->pool.max_pages = (int64_t)((bytes - without_pages) / t->page_bytes);
}

static void tkvi_visit_counts(tkvi_numbers *io) {
    tkvi_counts *c = &io->kv->counts;
    int i;
    tkvi_visit_count(io, &c->demoted);
    for (i = 0; i < TKV_MAX_LEVELS; i++) tkvi_visit_count(io, &c->recoded[i]);
    tkvi_visit_count(io, &c->refused);
    tkvi_visit_count(io, &c->offloaded);
    tkvi_visit_count(io, &c->unwritten);
    tkvi_visit_count(io, &c->promoted);
    tkvi_visit_count(io, &c->discarded);
    tkvi_visit_count(io, &c->recomputed);
    tkvi_visit_count(io, &c->evicted);
    tkvi_visit_count(io, &c->merged);
    tkvi_visit_count(io, &io->kv->states.n_thinned);
    tkvi_visit_count(io, &io->kv->call.clock);
}

/* >>statistics */
/* Mask of the versions of tables that have memory. */
static unsigned tkvi_allocated_versions(const tkv_cache *kv) {
    unsigned mask = 0;
    int v;
    for (v = 0; v < TKVI_VERSIONS; v++) mask |= (unsigned)(kv->tables.version[v].bytes != NULL) << v;
    return mask;
}

static void tkvi_visit_sums(tkvi_numbers *io, int64_t *sum, size_t n, int64_t least) {
    size_t i;
    for (i = 0; i < n && !io->is_wrong; i++) tkvi_visit_i64(io, &sum[i], least, TKVI_MOST_COUNT);
}

/* The heads of a table that was not made yet, as in a calibration. */
static void tkvi_visit_heads_ahead(tkvi_numbers *io, int layer, int version, int n_heads) {
    const tkvi_geometry *g = tkvi_geometry_of(io->kv, layer);
    const size_t bytes = tkvi_head_bytes(g);
    uint8_t room[6 + 5 * TKV_MAX_HEAD_DIM];
    int head;
    if (n_heads && (!tkvi_table_parts(io->kv, layer) || !(io->versions >> version & 1))) io->is_wrong = 1;
    for (head = 0; head < n_heads && !io->is_wrong; head++) {
        const uint8_t *from = io->at;
        if (io->mode == TKVI_SAVES_NUMBERS) (void)tkvi_save_head(io->kv, layer, version, head, room);
        tkvi_visit_bytes(io, room, bytes);
        if (io->mode == TKVI_SAVES_NUMBERS || io->is_wrong) continue;
        if (!tkvi_head_valid(g, from)) io->is_wrong = 1;
        else if (io->mode == TKVI_STORES_NUMBERS) tkvi_head_load(io->kv, layer, version, head, from);
    }
}

static void tkvi_visit_next_table(tkvi_numbers *io, int layer) {
    tkvi_next_table *next = &io->kv->stats.next_table[layer];
    int version, n_heads;
    tkvi_visit_int(io, &io->kv->stats.tokens_seen[layer], -1, TKVI_FOREVER);
    tkvi_visit_int(io, &next->due, 0, TKVI_FOREVER);
    tkvi_visit_int(io, &next->last, 0, TKVI_FOREVER);
    tkvi_visit_int(io, &next->restarts, 0, 1);
    version = tkvi_visit_int(io, &next->version, 0, TKVI_VERSIONS - 1);
    n_heads = tkvi_visit_int(io, &next->n_heads, 0, tkvi_geometry_of(io->kv, layer)->n_kv_heads);
    tkvi_visit_heads_ahead(io, layer, version, n_heads);
}

/* Sums of squared queries and of far attention. When all layers have their last table, there are none. */
static void tkvi_visit_table_sums(tkvi_numbers *io) {
    tkv_cache *kv = io->kv;
    tkvi_stats *stats = &kv->stats;
    const tkvi_places *end = &kv->tables.end;
    const int has_sums = (int)tkvi_visit_number(io, stats->q_sq_sum != NULL, 0, stats->q_sq_sum != NULL);
    size_t i;
    if (io->mode == TKVI_STORES_NUMBERS && !has_sums && stats->q_sq_sum) tkvi_free_stats(kv);
    if (!has_sums) return;
    tkvi_visit_sums(io, stats->q_sq_sum, end->channels, 0);
    tkvi_visit_sums(io, stats->n_sampled, end->heads, 0);
    for (i = 0; i < end->heads && !io->is_wrong; i++) {
        tkvi_visit_i64(io, &stats->far_attention[i].whole, 0, TKVI_MOST_COUNT);
        tkvi_visit_i64(io, &stats->far_attention[i].part, 0, TKVI_MOST_COUNT);
    }
}

/* What families know of queries: sums of q q^T, and states, which are fp16 numbers. */
static void tkvi_visit_queries(tkvi_numbers *io) {
    tkvi_stats *stats = &io->kv->stats;
    const tkvi_places *end = &io->kv->tables.end;
    size_t i;
    int layer, k;
    if (!TKVI_HAS_QUERY_LEARNERS || !stats->queries) return;
    for (layer = 0; layer < io->kv->tables.cfg.model.n_layers; layer++) {
        tkvi_visit_int(io, &stats->queries[layer].tokens, -1, TKVI_FOREVER);
        tkvi_visit_int(io, &stats->queries[layer].used, 0, TKVI_FOREVER);
    }
    tkvi_visit_sums(io, stats->q_products, end->products, -TKVI_MOST_COUNT);
    for (i = 0; i + 8 <= end->query_states && !io->is_wrong; i += 8) {
        uint16_t four[4];
        uint8_t at[8];
        const uint8_t *from = io->at;
        memcpy(four, stats->query_states + i, sizeof four);
        for (k = 0; k < 4; k++) tkvi_store16(at + 2 * k, four[k]);
        tkvi_visit_bytes(io, at, sizeof at);
        for (k = 0; k < 4 && io->mode != TKVI_SAVES_NUMBERS && !io->is_wrong; k++) {
            four[k] = tkvi_load16(from + 2 * k);
            if ((four[k] & 0x7c00u) == 0x7c00u) io->is_wrong = 1;
        }
        if (io->mode == TKVI_STORES_NUMBERS) memcpy(stats->query_states + i, four, sizeof four);
    }
}

static void tkvi_visit_learning(tkvi_numbers *io) {
    tkv_cache *kv = io->kv;
    int layer, v;
    io->versions = (unsigned)tkvi_visit_number(io, tkvi_allocated_versions(kv), 0,
                                               kv->tables.version_bytes ? (1 << TKVI_VERSIONS) - 1 : 0);
    for (v = 0; v < TKVI_VERSIONS && io->mode == TKVI_PROVIDES_NUMBERS; v++)
        if (io->versions >> v & 1) tkvi_provide_saved(io, tkvi_allocate_version(kv, v));
    for (layer = 0; kv->stats.tokens_seen && layer < kv->tables.cfg.model.n_layers; layer++)
        tkvi_visit_next_table(io, layer);
    tkvi_visit_table_sums(io);
    tkvi_visit_queries(io);
}

/* >>sequences */
#define TKVI_MOST_RESERVED (1 << 24) /* blocks that a file may reserve, where limits.max_tokens allows more */

/* Lengths that memory is reserved for. Arrays may be as long as these and the lists of the file need. */
static void tkvi_visit_reservations(tkvi_numbers *io) {
    tkv_cache *kv = io->kv;
    int seq;
    for (seq = 0; seq < kv->tables.cfg.limits.max_seqs; seq++) {
        const int len = tkvi_visit_int(io, &kv->seq[seq].reserved_len, 0, kv->tables.cfg.limits.max_tokens);
        if (io->mode == TKVI_CHECKS_NUMBERS)
            io->n_reserved += len ? (int64_t)kv->tables.cfg.model.n_layers * (2 * (len / TKVI_BLOCK) + 4) : 0;
    }
    if (io->n_reserved > TKVI_MOST_RESERVED) io->is_wrong = 1;
}

/* A length of an array. More than the lists and reservations of the file can have needed counts as that. */
static int tkvi_visit_cap(tkvi_numbers *io, uint32_t cap) {
    const int64_t y = tkvi_visit_number(io, cap, 0, TKVI_FOREVER), most = io->most_entries + io->n_reserved;
    return (int)(io->mode == TKVI_SAVES_NUMBERS || y < most ? y : most);
}

static void tkvi_visit_seq(tkvi_numbers *io, int seq) {
    tkv_cache *kv = io->kv;
    int layer, n;
    n = tkvi_visit_cap(io, kv->seq[seq].cap);
    if (io->mode == TKVI_PROVIDES_NUMBERS && n) tkvi_provide_saved(io, tkvi_grow_lists(kv, seq, n));
    n = tkvi_visit_cap(io, kv->states.list[seq].cap);
    if (io->mode == TKVI_PROVIDES_NUMBERS && n)
        tkvi_provide_saved(io, tkvi_grow_state_list(&kv->states, seq, n));
    tkvi_visit_count(io, &kv->seq[seq].used);
    for (layer = 0; layer < kv->tables.cfg.model.n_layers; layer++) {
        tkvi_list *list = tkvi_list_of(kv, seq, layer);
        tkvi_visit_int(io, &list->evict_len, 0, TKVI_FOREVER);
        tkvi_visit_int(io, &list->passed[TKVI_RECODED], 0, TKVI_FOREVER);
        tkvi_visit_int(io, &list->passed[TKVI_TIGHTEST], 0, TKVI_FOREVER);
        if (io->mode != TKVI_STORES_NUMBERS) continue;
        list->passed[TKVI_RECODED] = tkvi_min(list->passed[TKVI_RECODED], list->archive + list->warm);
        list->passed[TKVI_TIGHTEST] =
            tkvi_min(list->passed[TKVI_TIGHTEST], tkvi_min(list->archive, list->passed[TKVI_RECODED]));
    }
}

/* The table of rotations: a full budget may have emptied it while tokens are moved. */
static void tkvi_visit_turns(tkvi_numbers *io) {
    tkv_cache *kv = io->kv;
    tkvi_turns *t = &kv->turns;
    const int cap = tkvi_visit_cap(io, (uint32_t)t->cap), n = (int)tkvi_visit_number(io, t->n, 0, cap);
    int i, rope = 0, turned = 0;
    if (io->mode == TKVI_PROVIDES_NUMBERS && cap > t->cap && t->lanes)
        tkvi_provide_saved(io, tkvi_grow_turns(t, &kv->heap, cap));
    for (i = 0; i < n && !io->is_wrong; i++) {
        const int last_rope = rope, last_turned = turned;
        rope = (int)tkvi_visit_number(io, i < t->n ? t->key[i].rope : 0, 0, kv->tables.n_ropes - 1);
        turned = (int)tkvi_visit_number(io, i < t->n ? t->key[i].turned : 0, -TKVI_FOREVER, TKVI_FOREVER);
        if (i && (rope < last_rope || (rope == last_rope && turned <= last_turned))) io->is_wrong = 1;
        if (io->mode == TKVI_STORES_NUMBERS && t->n == i && i < t->cap)
            tkvi_insert_turn(t, &kv->tables, i, rope, turned);
    }
}

/* Arrays that all sequences share. The largest come first, so that none exists twice for a moment. */
static void tkvi_visit_arrays(tkvi_numbers *io) {
    tkv_cache *kv = io->kv;
    tkvi_pool *pool = &kv->pool;
    const int provides = io->mode == TKVI_PROVIDES_NUMBERS;
    int n, layer;
    n = tkvi_visit_cap(io, kv->work.choice_cap);
    if (provides) tkvi_provide_saved(io, tkvi_grow_choice(kv, (uint32_t)n));
    n = tkvi_visit_cap(io, pool->block_cap);
    if (provides) tkvi_provide_saved(io, tkvi_grow_blocks(pool, (uint32_t)n));
    n = tkvi_visit_cap(io, pool->page_cap);
    if (provides) tkvi_provide_saved(io, tkvi_grow_pages(pool, (uint32_t)n));
    io->n_pages = tkvi_visit_cap(io, pool->n_pages);
    tkvi_visit_turns(io);
    for (layer = 0; layer < kv->tables.cfg.model.n_layers; layer++) {
        int is_stateful = kv->states.is_stateful[layer];
        is_stateful = tkvi_visit_int(io, &is_stateful, 0, 1);
        if (!TKVI_HAS_STATES || io->mode != TKVI_STORES_NUMBERS || kv->states.is_stateful[layer]) continue;
        kv->states.n_stateful += is_stateful;
        kv->states.is_stateful[layer] = (uint8_t)is_stateful;
    }
}

/* >>meter */
static void tkvi_visit_error_sums(tkvi_numbers *io, tkvi_error_sums *sum) {
    tkvi_visit_count(io, &sum->samples);
    tkvi_visit_count(io, &sum->agreed);
    tkvi_visit_count(io, &sum->keys);
    tkvi_visit_count(io, &sum->kept);
    tkvi_visit_count(io, &sum->error);
    tkvi_visit_count(io, &sum->divergence);
    tkvi_visit_count(io, &sum->worst);
}

static void tkvi_visit_feedback(tkvi_numbers *io, tkv_feedback *f) {
    int i;
    tkvi_visit_float(io, &f->cfg.target); /* 0: it was not started */
    tkvi_visit_int(io, &f->cfg.cooldown, -1, TKV_FEEDBACK_HISTORY);
    tkvi_visit_int(io, &f->cfg.min_hot, 0, TKVI_FOREVER);
    tkvi_visit_int(io, &f->cfg.max_hot, 0, TKVI_FOREVER);
    tkvi_visit_int(io, &f->cfg.min_level, 0, TKV_MAX_LEVELS);
    tkvi_visit_int(io, &f->cfg.max_level, -1, TKV_MAX_LEVELS);
    tkvi_visit_int(io, &f->hot, 0, TKVI_FOREVER);
    tkvi_visit_int(io, &f->level, 0, TKV_MAX_LEVELS);
    tkvi_visit_int(io, &f->moved, 0, 1);
    tkvi_visit_float(io, &f->low);
    tkvi_visit_float(io, &f->gain);
    tkvi_visit_count(io, &f->since);
    tkvi_visit_count(io, &f->gained_at);
    tkvi_visit_count(io, &f->sum);
    tkvi_visit_count(io, &f->squares);
    tkvi_visit_count(io, &f->scores);
    tkvi_visit_count(io, &f->refused);
    tkvi_visit_count(io, &f->finer);
    tkvi_visit_count(io, &f->cheaper);
    for (i = 0; i < TKV_FEEDBACK_HISTORY; i++) tkvi_visit_u32(io, &f->history[i], 1u << 24);
}

/* The meter's copy of the block that begins at `start`, with zeros in the slots where the block has no token now.
 * Comparisons do not read a copy that no block, or a packed one, has. */
static uint8_t *tkvi_cleared_copy(const tkvi_numbers *io, const tkvi_head_probe *g, int start,
                                  const uint8_t *copy) {
    const tkv_cache *kv = io->kv;
    const tkvi_list *list = tkvi_list_of(kv, kv->meter->seq, g->layer);
    const uint32_t *ids = tkvi_ids(kv, kv->meter->seq, g->layer);
    const int i = tkvi_block_at(kv, list, ids, start);
    const tkvi_record *r =
        &kv->tables.layout[tkvi_layout_of(&kv->tables, g->layer, TKV_TIER_HOT)].record[g->head];
    uint64_t others = ~(uint64_t)0;
    if (i >= 0 && tkvi_block_start(kv, ids, i) == start && !kv->pool.entry[ids[i]].n_packed)
        others = ~tkvi_used_mask(kv, list, ids, i);
    memset(io->room, 0, kv->meter->record_bytes);
    memcpy(io->room, copy, r->k.bytes + r->v.bytes);
    tkvi_clear_slots(&r->k, others, io->room);
    tkvi_clear_slots(&r->v, others, io->room + r->v_at);
    return io->room;
}

static void tkvi_visit_meter(tkvi_numbers *io) {
    tkvi_meter *m = io->kv->meter;
    int i, a, n;
    if (!TKVI_HAS_METER || !m) return;
    tkvi_visit_int(io, &m->seq, TKV_NO_SEQ, io->kv->tables.cfg.limits.max_seqs - 1);
    tkvi_visit_error_sums(io, &m->scored);
    for (i = 0; i < m->n; i++) {
        tkvi_head_probe *g = &m->head_probe[i];
        n = tkvi_visit_int(io, &g->n, 0, m->slots);
        tkvi_visit_int(io, &g->stride, 1, TKVI_FOREVER);
        tkvi_visit_error_sums(io, &g->sum);
        for (a = 0; a < n && !io->is_wrong; a++) {
            uint8_t *copy = g->bytes + (size_t)g->slot[a] * m->record_bytes; /* in a new meter, of slot a */
            tkvi_visit_int(io, &g->start[a], 0, TKVI_FOREVER);
            if (io->mode == TKVI_SAVES_NUMBERS) copy = tkvi_cleared_copy(io, g, g->start[a], copy);
            tkvi_visit_bytes(io, copy, m->record_bytes);
        }
    }
    if (m->feedback) tkvi_visit_feedback(io, m->feedback);
}

/* >>all of it */
static void tkvi_visit_behind_config(tkvi_numbers *io) {
    int seq;
    tkvi_visit_budget(io);
    if (io->is_other) return;
    tkvi_visit_counts(io);
    tkvi_visit_reservations(io);
    tkvi_visit_arrays(io);
    for (seq = 0; seq < io->kv->tables.cfg.limits.max_seqs && !io->is_wrong; seq++) tkvi_visit_seq(io, seq);
    if (!io->is_wrong) tkvi_visit_learning(io);
    if (!io->is_wrong) tkvi_visit_meter(io);
    if (!io->is_wrong) tkvi_visit_rest_of_config(io);
}

static void tkvi_visit_cache(tkvi_numbers *io) {
    tkvi_visit_config(io);
    if (!io->is_other && !io->is_wrong) tkvi_visit_behind_config(io); /* else the arrays have other sizes */
}

#endif /* TKVI_PERSIST_WHOLE_H */
