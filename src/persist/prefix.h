/*
 * persist/prefix.h - prefixes by content: tkv_seq_publish_prefix puts the pages of a sequence into a store of the
 * caller's, tkv_seq_adopt_prefix takes them out again, in another cache, process or machine.
 *
 *     root       what decides the bytes of pages: model, geometry, RoPE, options, formats, tables, the caller's salt
 *     page i     tokens sinks + 256 i .. sinks + 256 (i + 1) - 1; page 0 has the sinks too
 *     hash[i]    SHA-256 of hash[i - 1], the tokens of page i, and its extras; hash[-1] is the root
 *     value      of hash[i]: page i as a saved sequence (persist/saved.h) whose model is hash[i] and whose tokens are
 *                | i | number of stateful layers | tokens of the page |
 *
 * Without a store, sequences of one cache find each other's pages: a publication names those of its sequence, and an
 * adoption forks the sequence that has most of them. A name goes with the first of its tokens that goes
 * (tkvi_forget_beside).
 *
 * A hash proposes, and the tokens in the value decide. A value is verified like any saved sequence, is loaded into an
 * empty sequence, and then its blocks join the adopting one (tkv_seq_copy). Whatever is wrong with a value ends the
 * prefix before it.
 *
 * Only pages whose blocks have left the hot tail on the path of the plan are published: hot, warm, archive, with the
 * table in the root, no token evicted, removed or moved. Equal hashes do not mean equal bytes: the last bits of the
 * model's keys and values can differ, the tier of a page depends on its age, and a block that was appended among many
 * can go from hot to archive without being warm. Each of them is a right page.
 */
#ifndef TKVI_PERSIST_PREFIX_H
#define TKVI_PERSIST_PREFIX_H

#include "core/sha256.h"
#include "persist/load.h"
#include "step/move.h"
#include "step/states.h"

#define TKVI_PAGE_HEAD 2 /* numbers before the tokens of a value */
#define TKVI_PAGES_AT_ONCE 8
#define TKVI_PREFIX_VERSION 1

typedef struct tkvi_prefix {
    tkv_cache *kv;
    const tkv_prefix_params *p;
    const tkv_prefix_store *store; /* NULL: the other sequences of the cache */
    tkv_prefix_info info;
    tkv_prefix_hash hash; /* of the page before `page` */
    int sinks, page;      /* page: the next one */
    size_t n_bytes;       /* of the values before it */
    int tokens[TKVI_PAGE_HEAD + TKVI_MOST_PAGE];
    tkvi_scratch scratch;
} tkvi_prefix;

static int tkvi_page_start(const tkvi_prefix *x, int page) {
    return page ? x->sinks + TKV_PAGE_TOKENS * page : 0;
}
static int tkvi_page_end(const tkvi_prefix *x, int page) { return x->sinks + TKV_PAGE_TOKENS * (page + 1); }

/* Pages that the tokens of the call have. */
static int tkvi_n_pages(const tkvi_prefix *x) {
    return tkvi_max(0, x->p->n_tokens - x->sinks) / TKV_PAGE_TOKENS;
}

static int tkvi_is_empty_seq(const tkv_cache *kv, int seq) {
    int layer;
    for (layer = 0; layer < kv->tables.cfg.model.n_layers; layer++)
        if (tkvi_list_of(kv, seq, layer)->len) return 0;
    return !TKVI_HAS_STATES || !kv->states.list[seq].n;
}

/* The tiers of a layer in the plan: at the level of a cache that has free memory. */
static const tkvi_tier_spec *tkvi_planned_tiers(const tkv_cache *kv, int layer) {
    return &tkvi_tier_specs_of(&kv->tables, layer)[kv->budget.pressure.cfg.min_level];
}

/* >>hashes */
/* Adds a field with its length, so that no two lists of fields are the same bytes. */
static void tkvi_hash_field(tkvi_sha256 *s, const void *bytes, size_t n) {
    uint8_t length[8];
    tkvi_store64(length, (uint64_t)n);
    tkvi_sha256_add(s, length, 8);
    tkvi_sha256_add(s, bytes, n);
}

static void tkvi_hash_number(tkvi_sha256 *s, int x) {
    uint8_t at[4];
    tkvi_store32(at, (uint32_t)x);
    tkvi_hash_field(s, at, 4);
}

/* Adds what decides the bytes of a layer's blocks. room: of the largest table. */
static void tkvi_hash_layer(tkvi_sha256 *s, const tkv_cache *kv, int layer, uint8_t *room) {
    const tkvi_plan *p = &kv->tables.plan[layer];
    const tkvi_tier_spec *spec;
    uint8_t at[12];
    int tier;
    tkvi_hash_number(s, p->stored_layer);
    if (p->stored_layer != layer) return;
    spec = tkvi_planned_tiers(kv, layer);
    tkvi_store_geometry(at, &p->geometry);
    tkvi_hash_field(s, at, 12);
    tkvi_store64(at, tkvi_rope_hash(p->rope));
    tkvi_hash_field(s, at, 8);
    tkvi_hash_number(s, p->sink);
    tkvi_hash_number(s, spec->warm > 0);
    for (tier = 0; tier < TKV_TIER_COUNT; tier++) {
        const tkv_format_pair pair = kv->tables.layout[spec->layout[tier]].pair;
        tkvi_hash_number(s, (int)pair.k);
        tkvi_hash_number(s, (int)pair.v);
    }
    tkvi_hash_number(s, tkvi_table_parts(kv, layer));
    if (tkvi_table_parts(kv, layer)) {
        const uint8_t *end =
            tkvi_save_table(kv, layer, kv->tables.current_version[layer], tkvi_table_parts(kv, layer), room);
        tkvi_hash_field(s, room, (size_t)(end - room));
    }
}

static void tkvi_hash_root(tkvi_prefix *x, uint8_t *room) {
    static const char name[] = "tieredkv prefix";
    const tkv_cache *kv = x->kv;
    tkvi_sha256 s = tkvi_sha256_begin();
    int i;
    tkvi_hash_field(&s, name, sizeof name);
    tkvi_hash_number(&s, TKVI_PREFIX_VERSION);
    tkvi_hash_number(&s, TKVI_SAVED_VERSION);
    tkvi_hash_field(&s, x->p->model, x->p->model_bytes);
    tkvi_hash_field(&s, x->p->salt, x->p->salt_bytes);
    for (i = 0; i < TKVI_OPTIONS; i++)
        tkvi_hash_number(&s, tkvi_member_int(&kv->tables.cfg.format, tkvi_option_rows[i].offset));
    tkvi_hash_number(&s, kv->tables.cfg.model.n_layers);
    for (i = 0; i < kv->tables.cfg.model.n_layers; i++) tkvi_hash_layer(&s, kv, i, room);
    tkvi_sha256_end(&s, x->hash.bytes);
}

/* The hash of a page. before: that of the page before it. */
static tkv_prefix_hash tkvi_hash_page(const tkvi_prefix *x, const tkv_prefix_hash *before, int page) {
    const int start = tkvi_page_start(x, page), end = tkvi_page_end(x, page);
    tkvi_sha256 s = tkvi_sha256_begin();
    tkv_prefix_hash out;
    uint8_t at[4];
    int i;
    tkvi_hash_field(&s, before->bytes, sizeof before->bytes);
    tkvi_hash_number(&s, end - start);
    for (i = start; i < end; i++) {
        tkvi_store32(at, (uint32_t)x->p->tokens[i]);
        tkvi_sha256_add(&s, at, 4);
    }
    for (i = 0; i < x->p->n_extras; i++) {
        const tkv_prefix_extra *e = &x->p->extras[i];
        if (e->index < start || e->index >= end) continue;
        tkvi_hash_number(&s, e->index);
        tkvi_hash_field(&s, e->bytes, e->size);
    }
    tkvi_sha256_end(&s, out.bytes);
    return out;
}

/* >>the path of the plan */
/* 1 if an entry has all tokens of its block, on the path of the plan. is_sinks: the block is that of the sinks. */
static int tkvi_is_on_path(const tkv_cache *kv, int layer, const tkvi_entry *e, int tokens, int is_sinks) {
    const tkvi_tier_spec *spec = tkvi_planned_tiers(kv, layer);
    const tkvi_block *b = &kv->pool.block[e->block];
    const int warm = tkvi_layout_at_level(&kv->tables, layer, spec, TKV_TIER_WARM),
              archive = tkvi_layout_at_level(&kv->tables, layer, spec, TKV_TIER_ARCHIVE);
    if (e->evicted_mask || e->n_packed || e->first_slot || e->end_slot || e->turned || tkvi_is_discarded(b) ||
        b->first_position != e->start + e->shift)
        return 0;
    if (is_sinks) return b->layout == kv->tables.plan[layer].sink_layout;
    if (tokens != TKVI_BLOCK || e->sink_mask || b->tier == TKV_TIER_HOT) return 0;
    if (kv->tables.n_levels == 1) return b->layout == archive || (spec->warm > 0 && b->layout == warm);
    if (spec->warm <= 0) return b->layout == archive && !b->previous_layout;
    return (b->layout == archive && b->previous_layout == warm + 1) ||
           (b->layout == warm && (!b->previous_layout || b->previous_layout == warm + 1));
}

/* 1 if a sequence has the tokens first .. end - 1 as blocks on the path of the plan, in all layers. ahead: positions of
 * its tokens less their indices. is_all: 1 if it must have no more tokens. */
static int tkvi_has_page(const tkv_cache *kv, int seq, int first, int end, int ahead, int is_all) {
    int layer, i;
    for (layer = 0; layer < kv->tables.cfg.model.n_layers; layer++) {
        const tkvi_list *list = tkvi_list_of(kv, seq, layer);
        const uint32_t *ids = tkvi_ids(kv, seq, layer);
        int at = first;
        if (kv->tables.plan[layer].stored_layer != layer) continue;
        for (i = 0; i < list->n && at < end; i++) {
            const int start = tkvi_block_start(kv, ids, i), tokens = tkvi_block_end(kv, list, ids, i) - start,
                      is_sinks = i < list->sinks;
            if (start < at) continue;
            if (start != at || kv->pool.entry[ids[i]].shift != ahead ||
                !tkvi_is_on_path(kv, layer, &kv->pool.entry[ids[i]], tokens, is_sinks))
                return 0;
            at += tokens;
        }
        if (at != end || (is_all && list->len != end)) return 0;
    }
    return 1;
}

/* Copies the states that src has after n tokens to dst, as those after n_there tokens. */
static tkv_status tkvi_copy_states(tkvi_prefix *x, int src, int n, int dst, int n_there) {
    tkv_cache *kv = x->kv;
    tkv_status st = TKV_OK;
    int layer;
    for (layer = 0; layer < kv->tables.cfg.model.n_layers && !st && TKVI_HAS_STATES; layer++) {
        uint8_t *bytes;
        size_t size = 0;
        if (tkv_seq_get_state(kv, src, layer, n, NULL, 0, &size)) continue;
        st = tkvi_take_scratch(&x->scratch, size, &bytes);
        if (!st) st = tkv_seq_get_state(kv, src, layer, n, bytes, size, NULL);
        if (!st) st = tkv_seq_put_state(kv, dst, layer, n_there, bytes, size);
        tkvi_give_back(&x->scratch, 0);
    }
    return st;
}

/* Empties the spare sequence. Returns st, whose sentence stays. */
static tkv_status tkvi_empty_spare(const tkvi_prefix *x, tkv_status st) {
    tkvi_clear_seq(x->kv, x->p->spare);
    tkvi_shrink_index(x->kv, x->p->spare);
    return st;
}

/* The scratch memory that x->scratch has left, for a save or a load. NULL: the heap gives it. */
static void *tkvi_rest_of_scratch(const tkvi_scratch *s, size_t *bytes) {
    const size_t used = tkvi_align_up((size_t)(uintptr_t)s->from) - (size_t)(uintptr_t)s->from + s->taken;
    *bytes = s->from && used < s->size ? s->size - used : 0;
    s->kv->call.scratch_used = s->from ? used : 0;
    return !s->from ? NULL : *bytes ? s->from + used : s->from;
}

/* >>names */
static int tkvi_are_same_tokens(const int *a, const int *b, int n) {
    while (n > 0 && *a == *b) a++, b++, n--;
    return n <= 0;
}

/* 1 if a sequence has named its page i so, and has these tokens there. A hash says where the page ends, too. */
static int tkvi_is_named(const tkvi_prefix *x, int seq, int i, const uint8_t *hash) {
    const tkvi_seq *s = &x->kv->seq[seq];
    const int first = tkvi_page_start(x, i), end = tkvi_page_end(x, i);
    return s->n_pages > i && memcmp(s->page[i].hash, hash, sizeof s->page[i].hash) == 0 &&
           tkvi_are_same_tokens(s->page[i].tokens, x->p->tokens + first, end - first);
}

/* Names the pages first .. n - 1 of the sequence. Those before them are named, and x->hash is of the last one. */
static tkv_status tkvi_name_pages(tkvi_prefix *x, int first, int n) {
    tkv_cache *kv = x->kv;
    tkvi_seq *s = &kv->seq[x->p->seq];
    const size_t bytes = (size_t)n * sizeof(tkvi_named_page);
    size_t needed = 0;
    if (n > s->page_cap) {
        tkvi_named_page *page;
        if (!tkvi_provide_bytes(kv, bytes, &needed)) return tkvi_refuse_over_budget(kv, needed);
        page = (tkvi_named_page *)tkvi_get(&kv->heap, bytes);
        if (!page) return tkvi_refuse_no_memory(kv, "no memory to name", n, " pages");
        memset(page, 0, bytes);
        if (first) memcpy(page, s->page, (size_t)first * sizeof *page);
        tkvi_forget_pages(kv, x->p->seq, 0);
        s->page = page;
        s->page_cap = n;
    }
    if (kv->tables.cfg.host.wipe_freed && s->n_pages > n)
        tkvi_wipe(s->page + n, (size_t)(s->n_pages - n) * sizeof *s->page);
    for (s->n_pages = first; s->n_pages < n; s->n_pages++) {
        const int start = tkvi_page_start(x, s->n_pages), end = tkvi_page_end(x, s->n_pages);
        tkvi_named_page *page = &s->page[s->n_pages];
        x->hash = tkvi_hash_page(x, &x->hash, s->n_pages);
        memcpy(page->hash, x->hash.bytes, sizeof page->hash);
        memcpy(page->tokens, x->p->tokens + start, (size_t)(end - start) * sizeof *page->tokens);
        page->end = end;
    }
    return TKV_OK;
}

/* How many of its first n pages a sequence has on the path of the plan. */
static int tkvi_n_on_path(const tkvi_prefix *x, int seq, int n) {
    int low = 0;
    while (low < n) {
        const int middle = n - (n - low) / 2;
        if (tkvi_has_page(x->kv, seq, 0, tkvi_page_end(x, middle - 1), 0, 0)) low = middle;
        else n = middle - 1;
    }
    return low;
}

/* A sequence that names as many of the pages as any; -1: none is named. A hash names all pages up to its own. */
static int tkvi_find_deepest(const tkvi_prefix *x, int *n) {
    const int n_seqs = x->kv->tables.cfg.limits.max_seqs, n_pages = tkvi_n_pages(x);
    tkv_prefix_hash hash = x->hash; /* of the cache */
    int seq, found = -1;
    for (*n = 0; *n < n_pages; ++*n) {
        hash = tkvi_hash_page(x, &hash, *n);
        for (seq = 0; seq < n_seqs; seq++)
            if (seq != x->p->seq && tkvi_is_named(x, seq, *n, hash.bytes)) break;
        if (seq == n_seqs) break;
        found = seq;
    }
    return found;
}

/* The sequence from which most pages can be shared, with the states behind them; -1: none. *n: these pages. */
static int tkvi_find_prefix(const tkvi_prefix *x, int *n) {
    const tkv_cache *kv = x->kv;
    int most, seq, found = -1;
    const int deepest = tkvi_find_deepest(x, &most);
    *n = 0;
    for (seq = 0; seq < kv->tables.cfg.limits.max_seqs && deepest >= 0; seq++) {
        int same = 0;
        if (seq == x->p->seq || kv->seq[seq].in_step) continue;
        while (same < most && tkvi_is_named(x, seq, same, kv->seq[deepest].page[same].hash)) same++;
        if (same <= *n) continue;
        same = tkvi_n_on_path(x, seq, same);
        while (same && TKVI_HAS_STATES && !tkvi_has_position(&kv->states, seq, tkvi_page_end(x, same - 1)))
            same--;
        if (same <= *n) continue;
        *n = same;
        found = seq;
    }
    return found;
}

/* >>publish */
/* Saves the page in the spare sequence and puts it into the store. A store that fails keeps nothing. */
static tkv_status tkvi_put_page(tkvi_prefix *x, const tkv_prefix_hash *hash, int tokens) {
    tkv_save_params save;
    uint8_t *bytes = NULL;
    size_t n = 0;
    tkv_status st;
    memset(&save, 0, sizeof save);
    save.seq = x->p->spare;
    save.model = hash->bytes;
    save.model_bytes = sizeof hash->bytes;
    save.tokens = x->tokens;
    save.n_tokens = TKVI_PAGE_HEAD + tokens;
    save.scratch = tkvi_rest_of_scratch(&x->scratch, &save.scratch_bytes);
    st = tkv_seq_save(x->kv, &save, NULL, 0, &n);
    x->kv->call.scratch_used = 0;
    if (!st) st = tkvi_take_scratch(&x->scratch, n, &bytes);
    save.scratch = tkvi_rest_of_scratch(&x->scratch, &save.scratch_bytes);
    if (!st) st = tkv_seq_save(x->kv, &save, bytes, n, NULL);
    if (!st) {
        const int failed = x->store->put(x->store->user, hash, bytes, n);
        x->info.n_put += !failed;
        x->info.bytes += failed ? 0 : n;
        x->info.n_rejected += failed != 0;
    }
    tkvi_give_back(&x->scratch, 0);
    return st;
}

static tkv_status tkvi_publish_page(tkvi_prefix *x, const tkv_prefix_hash *hash) {
    const int first = tkvi_page_start(x, x->page), end = tkvi_page_end(x, x->page), tokens = end - first;
    tkv_status st = tkv_seq_copy(x->kv, x->p->seq, first, end, x->p->spare, first);
    x->tokens[0] = x->page;
    x->tokens[1] = TKVI_HAS_STATES ? x->kv->states.n_stateful : 0;
    memcpy(x->tokens + TKVI_PAGE_HEAD, x->p->tokens + first, (size_t)tokens * sizeof *x->tokens);
    /* memory for the copy can have come from blocks that were coded again */
    if (!st && !tkvi_has_page(x->kv, x->p->spare, 0, tokens, first, 1)) return tkvi_empty_spare(x, TKV_OK);
    if (!st) st = tkvi_copy_states(x, x->p->seq, end, x->p->spare, tokens);
    if (!st) st = tkvi_put_page(x, hash, tokens);
    return tkvi_empty_spare(x, st);
}

static tkv_status tkvi_publish(tkvi_prefix *x) {
    tkv_status st = TKV_OK;
    for (; x->page < tkvi_n_pages(x); x->page++) {
        const int end = tkvi_page_end(x, x->page);
        const tkv_prefix_hash hash = tkvi_hash_page(x, &x->hash, x->page);
        if (!tkvi_has_page(x->kv, x->p->seq, tkvi_page_start(x, x->page), end, 0, 0)) break;
        if (!x->store->has || !x->store->has(x->store->user, &hash)) st = tkvi_publish_page(x, &hash);
        x->hash = hash;
        if (st || !tkvi_has_page(x->kv, x->p->seq, tkvi_page_start(x, x->page), end, 0, 0)) break;
        x->info.n_pages++;
        x->info.n_tokens = end;
    }
    return st;
}

/* Names the pages of the sequence for the others of the cache. The hash of a new page makes all behind it new. */
static tkv_status tkvi_publish_here(tkvi_prefix *x) {
    const int n = tkvi_n_on_path(x, x->p->seq, tkvi_n_pages(x));
    tkv_status st = TKV_OK;
    int named;
    for (named = 0; named < n; named++) {
        const tkv_prefix_hash hash = tkvi_hash_page(x, &x->hash, named);
        if (!tkvi_is_named(x, x->p->seq, named, hash.bytes)) break;
        x->hash = hash;
    }
    if (named < n) st = tkvi_name_pages(x, named, n);
    if (st || !n) return st;
    x->info.n_pages = n;
    x->info.n_tokens = tkvi_page_end(x, n - 1);
    x->info.n_put = n - named;
    return TKV_OK;
}

/* >>adopt */
/* 1 if the spare sequence has the page, and the caller's tokens. */
static int tkvi_is_page(const tkvi_prefix *x, const tkv_load_info *info) {
    const int first = tkvi_page_start(x, x->page), tokens = tkvi_page_end(x, x->page) - first;
    return info->n_saved_tokens == TKVI_PAGE_HEAD + tokens && x->tokens[0] == x->page && x->tokens[1] >= 0 &&
           x->tokens[1] <= x->kv->tables.cfg.model.n_layers &&
           tkvi_are_same_tokens(x->tokens + TKVI_PAGE_HEAD, x->p->tokens + first, tokens) &&
           tkvi_has_page(x->kv, x->p->spare, 0, tokens, first, 1);
}

/* The file of one sequence does not say which layouts a block had. Those of a page were on the path of the plan. */
static void tkvi_give_history(const tkvi_prefix *x) {
    int layer, i;
    for (layer = 0; layer < x->kv->tables.cfg.model.n_layers; layer++) {
        const uint32_t *ids = tkvi_ids(x->kv, x->p->spare, layer);
        const tkvi_list *list = tkvi_list_of(x->kv, x->p->spare, layer);
        const tkvi_tier_spec *spec;
        if (x->kv->tables.plan[layer].stored_layer != layer) continue;
        spec = tkvi_planned_tiers(x->kv, layer);
        for (i = list->sinks; i < list->n && spec->warm > 0; i++) {
            tkvi_block *b = tkvi_block_of(x->kv, ids[i]);
            if (b->tier == TKV_TIER_ARCHIVE)
                b->previous_layout =
                    (uint16_t)(tkvi_layout_at_level(&x->kv->tables, layer, spec, TKV_TIER_WARM) + 1);
        }
    }
}

/* Loads a value into the spare sequence, and joins its blocks to the sequence. *is_miss: 1 if the value is wrong. */
static tkv_status tkvi_adopt_page(tkvi_prefix *x, const tkv_prefix_hash *hash, const void *bytes, size_t size,
                                  int *is_miss) {
    const int first = tkvi_page_start(x, x->page), end = tkvi_page_end(x, x->page);
    tkv_load_params load;
    tkv_load_info info;
    tkv_status st;
    memset(&load, 0, sizeof load);
    memset(&info, 0, sizeof info);
    load.seq = x->p->spare;
    load.model = hash->bytes;
    load.model_bytes = sizeof hash->bytes;
    load.tokens = x->tokens;
    load.token_capacity = TKVI_PAGE_HEAD + end - first;
    load.scratch = tkvi_rest_of_scratch(&x->scratch, &load.scratch_bytes);
    x->kv->call.lacks_scratch = 0;
    st = tkv_seq_load(x->kv, &load, bytes, size, &info);
    if (!st) tkvi_give_history(x);
    *is_miss = st == TKV_ERR_DATA || st == TKV_ERR_CONFIG ||
               (st == TKV_ERR_CAPACITY && !x->kv->call.lacks_scratch) || info.n_recoded > 0 ||
               (!st && !tkvi_is_page(x, &info));
    if (!st && !*is_miss) st = tkv_seq_copy(x->kv, x->p->spare, first, end, x->p->seq, first);
    if (!st && !*is_miss) st = tkvi_copy_states(x, x->p->spare, end - first, x->p->seq, end);
    return tkvi_empty_spare(x, st);
}

/* Gives the adopted entries the tiers of their blocks. Tiers never get colder towards newer tokens: pages can have been
 * published at other ages. */
static void tkvi_give_tiers(tkv_cache *kv, int seq) {
    int layer, i;
    for (layer = 0; layer < kv->tables.cfg.model.n_layers; layer++) {
        tkvi_list *list = tkvi_list_of(kv, seq, layer);
        const uint32_t *ids = tkvi_ids(kv, seq, layer);
        int tier = TKV_TIER_ARCHIVE;
        list->archive = list->warm = 0;
        for (i = list->sinks; i < list->n; i++) {
            tier = tkvi_min(tier, tkvi_block_of(kv, ids[i])->tier);
            kv->pool.entry[ids[i]].tier = (uint8_t)tier;
            list->archive += tier == TKV_TIER_ARCHIVE;
            list->warm += tier == TKV_TIER_WARM;
        }
        list->chunk_start = list->step_len = list->len;
    }
}

/* Asks the store for the next pages. Returns how many it gave. */
static int tkvi_get_pages(const tkvi_prefix *x, tkv_prefix_hash *hash, const void **bytes, size_t *size) {
    const int n = tkvi_min(TKVI_PAGES_AT_ONCE, tkvi_n_pages(x) - x->page);
    int i, n_got;
    for (i = 0; i < n; i++) hash[i] = tkvi_hash_page(x, i ? &hash[i - 1] : &x->hash, x->page + i);
    n_got = n > 0 ? x->store->get(x->store->user, hash, n, bytes, size) : 0;
    return n_got < 0 ? 0 : tkvi_min(n_got, n);
}

/* 1 if the sequence has as many states after n tokens as a hybrid model needs: those of all stateful layers here, and
 * as many as the publisher had. */
static int tkvi_has_all_states(const tkvi_prefix *x, int n, int n_needed) {
    size_t size;
    int layer, n_states = 0;
    if (!TKVI_HAS_STATES) return !n_needed;
    for (layer = 0; layer < x->kv->tables.cfg.model.n_layers; layer++)
        n_states += tkv_seq_get_state(x->kv, x->p->seq, layer, n, NULL, 0, &size) == TKV_OK;
    return n_states >= tkvi_max(n_needed, x->kv->states.n_stateful);
}

/* Removes the pages behind the last one where every stateful layer has its state. The sentence of an error stays. */
static void tkvi_cut_adopted(tkvi_prefix *x) {
    char error[sizeof x->kv->call.error];
    memcpy(error, x->kv->call.error, sizeof error);
    while (x->info.n_pages && !tkvi_has_all_states(x, x->info.n_tokens, 0)) {
        x->info.n_pages--; /* full memory for states has taken one away */
        x->info.n_tokens = x->info.n_pages ? tkvi_page_end(x, x->info.n_pages - 1) : 0;
    }
    if (tkv_get_length(x->kv, x->p->seq, TKV_ALL_LAYERS) > x->info.n_tokens)
        (void)tkv_seq_truncate(x->kv, x->p->seq, x->info.n_tokens);
    memcpy(x->kv->call.error, error, sizeof error);
}

/* Shares the longest prefix that another sequence of the cache has named. */
static tkv_status tkvi_adopt_here(tkvi_prefix *x) {
    const int seq = x->p->seq;
    int n, from = tkvi_find_prefix(x, &n);
    tkv_status st = from < 0 ? TKV_OK : tkv_seq_fork(x->kv, from, seq, tkvi_page_end(x, n - 1));
    if (st || from < 0) return st;
    /* memory for the entries can have come from blocks that were coded again */
    n = tkvi_n_on_path(x, seq, n);
    x->info.n_pages = n;
    x->info.n_tokens = n ? tkvi_page_end(x, n - 1) : 0;
    tkvi_cut_adopted(x);
    return TKV_OK;
}

static tkv_status tkvi_adopt(tkvi_prefix *x) {
    tkv_prefix_hash hash[TKVI_PAGES_AT_ONCE];
    const void *bytes[TKVI_PAGES_AT_ONCE];
    size_t size[TKVI_PAGES_AT_ONCE], n_bytes = 0;
    tkv_status st = TKV_OK;
    int i, n, is_miss = 0, end;
    do {
        n = tkvi_get_pages(x, hash, bytes, size);
        for (i = 0; i < n; i++) {
            x->kv->seq[x->p->seq].used = x->kv->call.clock + 1; /* as new as the spare sequence in its load */
            if (!bytes[i]) is_miss = 1;
            else st = tkvi_adopt_page(x, &hash[i], bytes[i], size[i], &is_miss);
            x->info.n_rejected += is_miss && bytes[i];
            if (st || is_miss) break;
            tkvi_give_tiers(x->kv, x->p->seq); /* the next load can offload blocks that are archived */
            n_bytes += size[i];
            x->hash = hash[i];
            end = tkvi_page_end(x, x->page++);
            if (!tkvi_has_all_states(x, end, x->tokens[1])) continue;
            x->info.n_pages = x->page;
            x->info.n_tokens = end;
            x->info.bytes = n_bytes;
        }
    } while (n == TKVI_PAGES_AT_ONCE && i == n);
    if (is_miss) st = TKV_OK;
    tkvi_cut_adopted(x);
    tkvi_give_tiers(x->kv, x->p->seq);
    return st;
}

/* >>calls */
/* Checks that pages of this cache can be shared. *sinks: of its layers. */
static tkv_status tkvi_check_path(tkv_cache *kv, int *sinks) {
    const tkvi_plan *first = NULL;
    int layer;
    if (kv->tables.cfg.tiers.n_anchors)
        return tkvi_fail(kv, TKV_ERR_UNSUPPORTED, "set tiers.n_anchors to 0: pages have no anchors", 0, NULL);
    for (layer = 0; layer < kv->tables.cfg.model.n_layers; layer++) {
        const tkvi_plan *p = &kv->tables.plan[layer];
        if (p->stored_layer != layer) continue;
        if (!first) first = p;
        *sinks = first->sink;
        if (p->sink != first->sink)
            return tkvi_fail(kv, TKV_ERR_UNSUPPORTED, "pages need as many sinks as in layer 0: layer", layer,
                             "");
        if (p->kept_window)
            return tkvi_fail(kv, TKV_ERR_UNSUPPORTED, "pages expire with a window: layer", layer, "");
        if (p->query_parts)
            return tkvi_fail(kv, TKV_ERR_UNSUPPORTED,
                             "SQUAT depends on queries, so pages cannot be shared: layer", layer, "");
        if (tkvi_table_parts(kv, layer) &&
            (!tkvi_has_table(kv, layer) || (kv->stats.tokens_seen && kv->stats.tokens_seen[layer] >= 0)))
            return tkvi_fail(kv, TKV_ERR_STATE,
                             "load a calibration, or freeze what was learned: tables still change in layer",
                             layer, "");
    }
    return TKV_OK;
}

/* needs_spare: 1 with a store. */
static tkv_status tkvi_check_prefix_seqs(tkv_cache *kv, const tkv_prefix_params *p, int is_adopted,
                                         int needs_spare) {
    int i;
    for (i = 0; i < 1 + needs_spare; i++) {
        const int seq = i ? p->spare : p->seq;
        if (!tkvi_has_seq(kv, seq)) return tkvi_refuse_seq(kv, seq);
        if (kv->seq[seq].in_step)
            return tkvi_fail(kv, TKV_ERR_STATE, "a step is open; commit or abort it first: sequence", seq,
                             "");
    }
    if (needs_spare && p->seq == p->spare)
        return tkvi_fail(kv, TKV_ERR_ARG, "seq and spare are both sequence", p->seq, "");
    for (i = !is_adopted; i < 1 + needs_spare; i++) {
        const int seq = i ? p->spare : p->seq;
        if (!tkvi_is_empty_seq(kv, seq))
            return tkvi_fail(kv, TKV_ERR_STATE, "reset it first: tokens or states are in sequence", seq, "");
    }
    return TKV_OK;
}

static tkv_status tkvi_check_prefix_params(tkv_cache *kv, const tkv_prefix_params *p) {
    int i;
    if ((p->model_bytes && !p->model) || (p->salt_bytes && !p->salt) || p->n_tokens < 0 ||
        (p->n_tokens && !p->tokens) || p->n_extras < 0 || (p->n_extras && !p->extras))
        return tkvi_fail(kv, TKV_ERR_ARG, "model, salt, tokens or extras are missing, or a number is below 0",
                         0, NULL);
    if (p->n_tokens > kv->tables.cfg.limits.max_tokens)
        return tkvi_fail(kv, TKV_ERR_CAPACITY, "n_tokens is more than max_tokens", 0, NULL);
    for (i = 0; i < p->n_extras; i++)
        if ((p->extras[i].size && !p->extras[i].bytes) || p->extras[i].index < 0 ||
            p->extras[i].index >= p->n_tokens)
            return tkvi_fail(kv, TKV_ERR_ARG, "bytes are missing, or no token has the index: extra", i, "");
    return TKV_OK;
}

/* Makes the root. The parameters were checked. */
static tkv_status tkvi_begin_prefix(tkvi_prefix *x, tkv_cache *kv, const tkv_prefix_params *p) {
    uint8_t *room = NULL;
    tkv_status st;
    memset(x, 0, sizeof *x);
    st = tkvi_check_path(kv, &x->sinks);
    if (st) return st;
    x->kv = kv;
    x->p = p;
    x->scratch = tkvi_scratch_of(kv, p->scratch, p->scratch_bytes);
    if (tkvi_room_for_table(kv)) st = tkvi_take_scratch(&x->scratch, tkvi_room_for_table(kv), &room);
    if (!st) tkvi_hash_root(x, room);
    tkvi_give_back(&x->scratch, 0);
    return st;
}

TKV_API tkv_status tkv_get_prefix_hash(tkv_cache *kv, const tkv_prefix_params *p, int n_pages,
                                       tkv_prefix_hash *out) {
    tkvi_prefix x;
    tkv_status st;
    if (!TKVI_HAS_PREFIXES) return tkvi_refuse_left_out(kv, "TKV_NO_SAVE or TKV_NO_MOVES leaves this out");
    if (!kv || !p || !out) return tkvi_refuse_missing(kv, "the parameters or out are missing");
    st = tkvi_check_prefix_params(kv, p);
    if (!st) st = tkvi_begin_prefix(&x, kv, p);
    if (st) return st;
    if (n_pages < 0 || n_pages > tkvi_n_pages(&x))
        return tkvi_fail(kv, TKV_ERR_ARG, "n_tokens has another number of pages; asked for", n_pages, "");
    for (; x.page < n_pages; x.page++) x.hash = tkvi_hash_page(&x, &x.hash, x.page);
    *out = x.hash;
    return tkvi_ok(kv);
}

static tkv_status tkvi_share_prefix(tkv_cache *kv, const tkv_prefix_params *p, const tkv_prefix_store *store,
                                    tkv_prefix_info *out, int is_adopted) {
    tkvi_prefix x;
    tkv_status st;
    if (out) memset(out, 0, sizeof *out);
    if (!TKVI_HAS_PREFIXES) return tkvi_refuse_left_out(kv, "TKV_NO_SAVE or TKV_NO_MOVES leaves this out");
    if (!kv || !p) return tkvi_refuse_missing(kv, "the parameters are missing");
    st = tkvi_check_prefix_params(kv, p);
    if (!st && store && (is_adopted ? !store->get : !store->put))
        st = tkvi_fail(kv, TKV_ERR_ARG, "the store lacks get or put", 0, NULL);
    if (!st && !store && kv->pool.keep_all)
        st = tkvi_fail(kv, TKV_ERR_CAPACITY, "in place there is no memory for names of pages; give a store",
                       0, NULL);
    if (!st) st = tkvi_check_prefix_seqs(kv, p, is_adopted, store != NULL);
    if (!st) st = tkvi_begin_prefix(&x, kv, p);
    if (st) return st;
    x.store = store;
    if (store) st = is_adopted ? tkvi_adopt(&x) : tkvi_publish(&x);
    else st = is_adopted ? tkvi_adopt_here(&x) : tkvi_publish_here(&x);
    kv->call.scratch_used = 0;
    if (out) *out = x.info;
    return st ? st : tkvi_ok(kv);
}

TKV_API tkv_status tkv_seq_publish_prefix(tkv_cache *kv, const tkv_prefix_params *p,
                                          const tkv_prefix_store *store, tkv_prefix_info *out) {
    return tkvi_share_prefix(kv, p, store, out, 0);
}

TKV_API tkv_status tkv_seq_adopt_prefix(tkv_cache *kv, const tkv_prefix_params *p,
                                        const tkv_prefix_store *store, tkv_prefix_info *out) {
    return tkvi_share_prefix(kv, p, store, out, 1);
}

#endif /* TKVI_PERSIST_PREFIX_H */
