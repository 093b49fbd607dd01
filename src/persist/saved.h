/*
 * persist/saved.h - the bytes of a saved sequence. All numbers are little-endian. Sections begin at multiples of 64,
 * and the bytes between them are zero. So blocks lie in a file as they lie in a cache.
 *
 *     | head | model | tokens | tables, by layer | records, by layer | lists, by layer | states | index | end |
 *
 * The manual draws all bytes (11. BYTES, saved files).
 *
 * The checksums find accidents. They do not stop an attacker, who can compute them: authenticate files outside.
 */
#ifndef TKVI_PERSIST_SAVED_H
#define TKVI_PERSIST_SAVED_H

#include "core/checksum.h"
#include "learn/calibration.h"
#include "reclaim/offload.h"
#include "reclaim/versions.h"

#define TKVI_SAVED_VERSION 1
#define TKVI_SAVED_HEAD 64
#define TKVI_SAVED_LIST 48
#define TKVI_SAVED_ENTRIES 48 /* of a whole cache 16 more */
#define TKVI_SAVED_BLOCKS 24  /* of a whole cache 8 more */
#define TKVI_SAVED_RUN_MOST 64
#define TKVI_SAVED_META 168
#define TKVI_SAVED_SCORES (4 * TKVI_BLOCK)
#define TKVI_SAVED_STATE 16
#define TKVI_SAVED_SECTION 32
#define TKVI_SAVED_END 40
#define TKVI_SAVED_TOKENS_AT_ONCE 4096
#define TKVI_NO_VERSION 255
#define TKVI_SHARED_STATE ((uint64_t)1 << 63)

enum {
    TKVI_SAVED_HAS_META = 1,
    TKVI_SAVED_HAS_SCORES = 2,
    TKVI_SAVED_IS_CACHE = 4,
    TKVI_SAVED_HAS_SHIFTS = 8 /* a list ends with its shift and expired_end; else its tokens tell them */
};

typedef enum tkvi_saved_kind {
    TKVI_SAVED_HEAD_KIND,
    TKVI_SAVED_MODEL,
    TKVI_SAVED_TOKENS,
    TKVI_SAVED_TABLES,
    TKVI_SAVED_RECORDS,
    TKVI_SAVED_LISTS,
    TKVI_SAVED_STATES,
    TKVI_SAVED_CACHE,
    TKVI_SAVED_KINDS
} tkvi_saved_kind;

/* 1 if sections of this kind exist once for each layer with blocks of its own. */
static int tkvi_is_by_layer(int kind) { return kind >= TKVI_SAVED_TABLES && kind <= TKVI_SAVED_LISTS; }

/* Bytes of a run of entries, and of a run of blocks. */
static size_t tkvi_entry_run_bytes(int is_cache) { return TKVI_SAVED_ENTRIES + (is_cache ? 16u : 0u); }
static size_t tkvi_block_run_bytes(int is_cache) { return TKVI_SAVED_BLOCKS + (is_cache ? 8u : 0u); }

static size_t tkvi_gap_to(size_t at, size_t unit) { return (unit - at % unit) % unit; }

/* End of the bytes of a block in its slot. Where heads share bytes by a table, it must be known. */
static size_t tkvi_record_end(const tkvi_layout *c) {
    const tkvi_record *last = &c->record[c->n_kv_heads - 1];
    return last->at + last->k.bytes + last->v.bytes;
}

/* Bytes of a saved record, its checksum and the zeros behind it. */
static size_t tkvi_saved_record_bytes(const tkvi_layout *c) {
    const size_t n = c->bytes.total + 8;
    return n + tkvi_gap_to(n, 64);
}

static int tkvi_saved_int(const uint8_t *at) {
    const uint32_t x = tkvi_load32(at);
    return x < 0x80000000u ? (int)x : -(int)(0xffffffffu - x) - 1;
}

static int tkvi_are_zeros(const uint8_t *p, size_t n) {
    while (n && !*p) p++, n--;
    return n == 0;
}

/* Hash of what rotates the keys of a layer. 0: nothing is known of it. */
static uint64_t tkvi_rope_hash(const tkvi_rope *rope) {
    tkvi_xxh64_sum sum;
    uint8_t word[8];
    int j;
    if (!rope) return 0;
    memset(&sum, 0, sizeof sum);
    tkvi_store64(word, (uint64_t)(uint32_t)rope->pairs << 32 | (uint32_t)rope->apart);
    tkvi_xxh64_add(&sum, word, 8);
    tkvi_store64(word, (uint64_t)(uint32_t)rope->step << 32 | (uint32_t)rope->first);
    tkvi_xxh64_add(&sum, word, 8);
    for (j = 0; j < rope->pairs; j++) {
        tkvi_store64(word, rope->frequency[j]);
        tkvi_xxh64_add(&sum, word, 8);
    }
    return tkvi_xxh64_end(&sum);
}

/* >>frame */
/* A save whose index was verified. */
typedef struct tkvi_saved_file {
    const uint8_t *bytes, *index;
    size_t start, end; /* of this save; start is 0 unless others lie before it */
    uint32_t n_sections;
} tkvi_saved_file;

typedef struct tkvi_section {
    const uint8_t *at;
    size_t n;
} tkvi_section;

static const uint8_t *tkvi_saved_index_entry(const tkvi_saved_file *f, uint32_t i) {
    return f->index + (size_t)i * TKVI_SAVED_SECTION;
}

/* Reads the end of the save that ends at `size`. head: the first 8 bytes of the file. Returns NULL,
 * or what is wrong. */
static const char *tkvi_read_end(tkvi_saved_file *f, const uint8_t *head, const uint8_t *end, size_t size,
                                 size_t *index_at) {
    const uint64_t at = tkvi_load64(end), start = tkvi_load64(end + 8);
    if (memcmp(head, "TKVS", 4) != 0) return "these bytes are no saved sequence";
    if (tkvi_load32(head + 4) != TKVI_SAVED_VERSION)
        return "the sequence was saved by a newer version of this library";
    f->n_sections = tkvi_load32(end + 16);
    if (memcmp(end + 32, "TKVSEND", 8) != 0 || size % 64 || start % 64 || start > size || at < start ||
        at > size - TKVI_SAVED_END ||
        size - TKVI_SAVED_END - (size_t)at != (uint64_t)f->n_sections * TKVI_SAVED_SECTION)
        return "the saved sequence was cut, or is longer than it should be";
    f->start = (size_t)start;
    f->end = size;
    *index_at = (size_t)at;
    return NULL;
}

/* Checks the index, behind which the bytes of the end lie. Returns NULL, or what is wrong. */
static const char *tkvi_check_index(const tkvi_saved_file *f) {
    const size_t n = (size_t)f->n_sections * TKVI_SAVED_SECTION;
    const uint8_t *end = f->index + n;
    return tkvi_xxh64(0, f->index, n + TKVI_SAVED_END - 16) != tkvi_load64(end + 24) ||
                   tkvi_load32(end + 20) != TKVI_SAVED_VERSION
               ? "the saved sequence was damaged: the checksum of its index is wrong"
               : NULL;
}

/* Opens the save that ends at `size`. Returns NULL, or what is wrong. */
static const char *tkvi_open_save(tkvi_saved_file *f, const uint8_t *bytes, size_t size) {
    const char *fault;
    size_t index_at;
    if (size < TKVI_SAVED_HEAD + TKVI_SAVED_END) return "these bytes are no saved sequence";
    fault = tkvi_read_end(f, bytes, bytes + size - TKVI_SAVED_END, size, &index_at);
    if (fault) return fault;
    f->bytes = bytes;
    f->index = bytes + index_at;
    return tkvi_check_index(f);
}

/* Opens the last whole save that ends at `size` or before. Returns NULL, or what is wrong with all of them. */
static const char *tkvi_open_last_save(tkvi_saved_file *f, const uint8_t *bytes, size_t size) {
    const char *fault = tkvi_open_save(f, bytes, size);
    for (size -= size % 64; fault && size >= 64; size -= 64)
        if (memcmp(bytes + size - 8, "TKVSEND", 8) == 0) fault = tkvi_open_save(f, bytes, size);
    return fault;
}

/* A walk over the sections of a save. */
typedef struct tkvi_section_walk {
    uint32_t i;         /* the next section */
    size_t at;          /* end of the last one that this save wrote */
    size_t gap_at, gap; /* bytes that must be zero, before the last section that was passed */
    uint64_t before;    /* kind and number of that one */
} tkvi_section_walk;

/* Passes a section. Those that this save wrote lie one behind the other, the others before it. Returns NULL, or what is
 * wrong. */
static const char *tkvi_walk_section(const tkvi_saved_file *f, size_t index_at, tkvi_section_walk *w) {
    const uint8_t *e = tkvi_saved_index_entry(f, w->i);
    const uint64_t name = (uint64_t)tkvi_load32(e) << 32 | tkvi_load32(e + 4), from = tkvi_load64(e + 8),
                   n = tkvi_load64(e + 16);
    const size_t gap = tkvi_gap_to(w->at, 64);
    const int is_new = from >= f->start;
    int fits = tkvi_load32(e) < TKVI_SAVED_KINDS && (w->i == 0 || name > w->before);
    if (is_new) fits = fits && gap <= index_at - w->at && from == w->at + gap && n <= index_at - w->at - gap;
    else fits = fits && from % 64 == 0 && n <= f->start - from && tkvi_load32(e) != TKVI_SAVED_RECORDS;
    if (!fits) return "the saved sequence has a section where none can be";
    w->before = name;
    w->gap_at = w->at;
    w->gap = is_new ? gap : 0;
    if (is_new) w->at += gap + (size_t)n;
    w->i++;
    return NULL;
}

/* Goes behind the last section. */
static const char *tkvi_end_walk(size_t index_at, tkvi_section_walk *w) {
    w->gap_at = w->at;
    w->gap = index_at - w->at;
    return w->gap >= 64 ? "the saved sequence has bytes in no section" : NULL;
}

/* Checks the sections of a save. All have right checksums but the records, which have their own. Returns NULL, or what
 * is wrong. */
static const char *tkvi_find_section_fault(const tkvi_saved_file *f) {
    const size_t index_at = (size_t)(f->index - f->bytes);
    tkvi_section_walk w;
    const char *fault = NULL;
    memset(&w, 0, sizeof w);
    w.at = f->start;
    while (w.i < f->n_sections) {
        const uint8_t *e = tkvi_saved_index_entry(f, w.i);
        fault = tkvi_walk_section(f, index_at, &w);
        if (fault) return fault;
        if (!tkvi_are_zeros(f->bytes + w.gap_at, w.gap))
            return "the saved sequence has a section where none can be";
        if (tkvi_load32(e) == TKVI_SAVED_RECORDS
                ? tkvi_load64(e + 24) != 0
                : tkvi_xxh64(0, f->bytes + (size_t)tkvi_load64(e + 8), (size_t)tkvi_load64(e + 16)) !=
                      tkvi_load64(e + 24))
            return "the saved sequence was damaged: the checksum of a section is wrong";
    }
    fault = tkvi_end_walk(index_at, &w);
    if (!fault && !tkvi_are_zeros(f->bytes + w.gap_at, w.gap))
        fault = "the saved sequence has bytes in no section";
    return fault;
}

/* The section of a kind and layer; at NULL: there is none. *sum: its checksum; may be NULL. */
static tkvi_section tkvi_find_section(const tkvi_saved_file *f, int kind, int layer, uint64_t *sum) {
    const uint64_t name = (uint64_t)(uint32_t)kind << 32 | (uint32_t)layer;
    uint32_t low = 0, high = f->n_sections;
    tkvi_section found = {NULL, 0};
    while (low < high) {
        const uint32_t mid = low + (high - low) / 2;
        const uint8_t *e = tkvi_saved_index_entry(f, mid);
        const uint64_t at = (uint64_t)tkvi_load32(e) << 32 | tkvi_load32(e + 4), from = tkvi_load64(e + 8);
        if (at == name) {
            if (from > f->end || tkvi_load64(e + 16) > f->end - from) return found;
            found.at = f->bytes + (size_t)from;
            found.n = (size_t)tkvi_load64(e + 16);
            if (sum) *sum = tkvi_load64(e + 24);
            return found;
        }
        if (at < name) low = mid + 1;
        else high = mid;
    }
    return found;
}

/* >>lists */
/* The list of a layer, with runs of entries and runs of blocks. */
typedef struct tkvi_saved_list {
    const uint8_t *entries, *blocks, *meta; /* meta NULL: none */
    size_t meta_bytes;                      /* of an entry */
    int n, sinks, archive, warm, anchors, len, expired, chunk_start, is_moved, n_blocks, n_entry_runs,
        n_block_runs;
    int shift, expired_end; /* where a flag says so; else 0 */
    int run;                /* of the entry that was read last */
    int is_cache;           /* 1: of a whole cache */
    int seq;                /* of a whole cache: its sequence; else 0 */
} tkvi_saved_list;

static const uint8_t *tkvi_saved_entries(const tkvi_saved_list *list, int run) {
    return list->entries + (size_t)run * tkvi_entry_run_bytes(list->is_cache);
}

static const uint8_t *tkvi_saved_blocks(const tkvi_saved_list *list, int run) {
    return list->blocks + (size_t)run * tkvi_block_run_bytes(list->is_cache);
}

static int tkvi_saved_repeat(const uint8_t *run_of_blocks) { return tkvi_saved_int(run_of_blocks + 12); }

/* Reads a section of a list. flags: of the head. seq: its sequence in a whole cache. Returns NULL, or what is wrong. */
static const char *tkvi_open_saved_list(tkvi_section s, int flags, int seq, tkvi_saved_list *out) {
    const int is_cache = (flags & TKVI_SAVED_IS_CACHE) != 0;
    const size_t entry_bytes = tkvi_entry_run_bytes(is_cache), block_bytes = tkvi_block_run_bytes(is_cache);
    int field[12], i, at;
    size_t bytes;
    int64_t n;
    memset(out, 0, sizeof *out);
    out->is_cache = is_cache;
    out->seq = is_cache ? seq : 0;
    if (flags & TKVI_SAVED_HAS_SHIFTS && s.n >= TKVI_SAVED_LIST + 8) {
        s.n -= 8;
        out->shift = tkvi_saved_int(s.at + s.n);
        out->expired_end = tkvi_saved_int(s.at + s.n + 4);
    }
    if (s.n < TKVI_SAVED_LIST) return "there is no list of layer";
    for (i = 0; i < 12; i++) {
        field[i] = tkvi_saved_int(s.at + 4 * i);
        if (field[i] < 0 || field[i] > TKVI_FOREVER) return "a number is too large in layer";
    }
    out->n = field[0];
    out->sinks = field[1];
    out->archive = field[2];
    out->warm = field[3];
    out->anchors = field[4];
    out->len = field[5];
    out->expired = field[6];
    out->chunk_start = field[7];
    out->is_moved = field[8];
    out->n_blocks = field[9];
    out->n_entry_runs = field[10];
    out->n_block_runs = field[11];
    bytes = s.n - TKVI_SAVED_LIST;
    if (bytes / entry_bytes < (size_t)out->n_entry_runs)
        return "the list has another size than its entries, layer";
    bytes -= (size_t)out->n_entry_runs * entry_bytes;
    if (bytes / block_bytes < (size_t)out->n_block_runs)
        return "the list has another size than its blocks, layer";
    bytes -= (size_t)out->n_block_runs * block_bytes;
    if (flags & TKVI_SAVED_HAS_META)
        out->meta_bytes = TKVI_SAVED_META + (flags & TKVI_SAVED_HAS_SCORES ? (size_t)TKVI_SAVED_SCORES : 0u);
    if (out->meta_bytes ? bytes % out->meta_bytes || bytes / out->meta_bytes != (size_t)out->n : bytes != 0)
        return "the list has another size than its entries, layer";
    out->entries = s.at + TKVI_SAVED_LIST;
    out->blocks = out->entries + (size_t)out->n_entry_runs * entry_bytes;
    out->meta = out->meta_bytes ? out->blocks + (size_t)out->n_block_runs * block_bytes : NULL;
    for (i = 0, n = 0; i < out->n_entry_runs; i++) {
        at = tkvi_saved_int(tkvi_saved_entries(out, i) + 12);
        if (tkvi_saved_int(tkvi_saved_entries(out, i)) != n || at < 1 || (n += at) > out->n)
            return "entries are miscounted in layer";
    }
    if (n != out->n) return "entries are miscounted in layer";
    for (i = 0, n = 0; i < out->n_block_runs; i++) {
        const uint8_t *run = tkvi_saved_blocks(out, i);
        at = tkvi_saved_repeat(run);
        if (at < 1 || (n += at) > out->n_blocks) return "blocks are miscounted in layer";
        if ((int64_t)tkvi_saved_int(run + 8) + (int64_t)at * run[5] > TKVI_FOREVER)
            return "a block has a position that it cannot have, layer";
    }
    return n == out->n_blocks && n <= out->n ? NULL : "blocks are miscounted in layer";
}

/* The run of entry i. */
static const uint8_t *tkvi_run_of_entry(tkvi_saved_list *list, int i) {
    int low = 0, high = list->n_entry_runs;
    const uint8_t *at = tkvi_saved_entries(list, list->run);
    if (i >= tkvi_saved_int(at)) low = list->run;
    if (i >= tkvi_saved_int(at) && i - tkvi_saved_int(at) < tkvi_saved_int(at + 12)) return at;
    while (high - low > 1) {
        const int mid = low + (high - low) / 2;
        if (tkvi_saved_int(tkvi_saved_entries(list, mid)) <= i) low = mid;
        else high = mid;
    }
    list->run = low;
    return tkvi_saved_entries(list, low);
}

/* Start of entry i, in 64 bits: it was not checked yet. */
static int64_t tkvi_saved_start(tkvi_saved_list *list, int i) {
    const uint8_t *at = tkvi_run_of_entry(list, i);
    return (int64_t)tkvi_saved_int(at + 8) + (int64_t)at[29] * (i - tkvi_saved_int(at));
}

/* An entry of a file: its sequence, 0 unless the file is a whole cache, and its index in the list. */
typedef struct tkvi_saved_holder {
    int seq, i;
} tkvi_saved_holder;

static int tkvi_is_same_holder(const tkvi_saved_holder *a, const tkvi_saved_holder *b) {
    return a->seq == b->seq && a->i == b->i;
}

/* The holder that a run names for entry `behind` of it. i -1: no list has such an entry. */
static tkvi_saved_holder tkvi_saved_holder_at(const uint8_t *seq, const uint8_t *first, int behind) {
    const int64_t i = (int64_t)tkvi_saved_int(first) + behind;
    tkvi_saved_holder h;
    h.seq = seq ? tkvi_saved_int(seq) : 0;
    h.i = i < 0 || i > TKVI_FOREVER ? -1 : (int)i;
    return h;
}

/* The next holder of the block of entry i, in a whole cache. */
static tkvi_saved_holder tkvi_saved_next_holder(tkvi_saved_list *list, int i) {
    const uint8_t *at = tkvi_run_of_entry(list, i);
    return tkvi_saved_holder_at(at + 52, at + 56, i - tkvi_saved_int(at));
}

static int tkvi_is_own_block(const tkvi_saved_list *list, int i, const tkvi_saved_holder *first) {
    return first->seq == list->seq && first->i == i;
}

/* Reads an entry. *first: the first entry with its block. */
static tkvi_entry tkvi_read_entry(tkvi_saved_list *list, int i, tkvi_saved_holder *first) {
    const uint8_t *at = tkvi_run_of_entry(list, i);
    const int64_t start = tkvi_saved_start(list, i);
    tkvi_entry e;
    memset(&e, 0, sizeof e);
    *first = tkvi_saved_holder_at(list->is_cache ? at + 48 : NULL, at + 4, i - tkvi_saved_int(at));
    e.start = start < 0 || start > TKVI_FOREVER ? -1 : (int)start;
    e.shift = tkvi_saved_int(at + 16);
    e.turned = tkvi_saved_int(at + 20);
    e.n_packed = (int8_t)(at[24] & 127);
    e.first_slot = at[25];
    e.end_slot = at[26];
    e.tier = at[27];
    e.has_anchors = at[28];
    e.evicted_mask = tkvi_load64(at + 32);
    e.sink_mask = tkvi_load64(at + 40);
    e.in_use = 1;
    return e;
}

/* Slots in use of a saved entry, as tkvi_block_tokens. */
static int64_t tkvi_saved_tokens(tkvi_saved_list *list, int i, const tkvi_entry *e) {
    const int64_t end = i + 1 < list->n ? tkvi_saved_start(list, i + 1) : list->len;
    if (e->n_packed) return e->n_packed;
    return e->end_slot ? e->end_slot : e->first_slot + end - e->start;
}

/* Reads the blocks of a list one by one. */
typedef struct tkvi_block_cursor {
    const uint8_t *run; /* of the block; NULL: none was read */
    int runs, within;   /* runs that were begun; number of the block in its run */
} tkvi_block_cursor;

/* Goes to the next block. There is one. */
static void tkvi_next_saved_block(const tkvi_saved_list *list, tkvi_block_cursor *c) {
    if (c->run && ++c->within < tkvi_saved_repeat(c->run)) return;
    c->run = tkvi_saved_blocks(list, c->runs++);
    c->within = 0;
}

/* First position of block k from the cursor on, in its run. */
static int tkvi_saved_first_position(const tkvi_block_cursor *c, int k) {
    return tkvi_saved_int(c->run + 8) + (c->within + k) * c->run[5];
}

/* Where the record of block k from the cursor on begins, in its run. layout: of the run. */
static uint64_t tkvi_saved_record_at(const tkvi_block_cursor *c, int k, const tkvi_layout *layout) {
    return tkvi_load64(c->run + 16) + (uint64_t)(c->within + k) * tkvi_saved_record_bytes(layout);
}

/* Entries that differ only in their starts: of one run, with own blocks of one run. Or one with an earlier block. */
typedef struct tkvi_saved_group {
    tkvi_entry e;            /* the first one */
    int i, n;                /* its index; entries */
    tkvi_saved_holder first; /* the first entry with its block: i, or an earlier one, and then n is 1 */
    int is_own;              /* 1: it is i */
    int step;                /* tokens between starts */
    tkvi_block_cursor c;     /* if is_own, at the block of the first one */
} tkvi_saved_group;

/* Goes to the next group of a list. g begins as zeros. Returns 0 behind the last one. No group has other entries and
 * the two newest ones, which stay in RAM. */
static int tkvi_next_group(tkvi_saved_list *list, tkvi_saved_group *g) {
    const uint8_t *at;
    if (g->n && g->is_own) g->c.within += g->n - 1;
    g->i += g->n;
    if (g->i >= list->n) return 0;
    at = tkvi_run_of_entry(list, g->i);
    g->e = tkvi_read_entry(list, g->i, &g->first);
    g->step = at[29];
    g->n = 1;
    g->is_own = tkvi_is_own_block(list, g->i, &g->first);
    if (!g->is_own) return 1;
    tkvi_next_saved_block(list, &g->c);
    g->n = tkvi_min(tkvi_saved_int(at) + tkvi_saved_int(at + 12) - g->i,
                    tkvi_saved_repeat(g->c.run) - g->c.within);
    if (g->i < list->n - 2) g->n = tkvi_min(g->n, list->n - 2 - g->i);
    return 1;
}

/* The rule by which the bits of a layer's coded keys are shared out. 1: channels count in whole groups, and a head
 * has at least two tile bits (tkvi_head_budget). The rule before it gave fewer, and wrote 0. 0: both give the same
 * bytes. */
static int tkvi_sharing_rule(const tkv_cache *kv, int layer, int format) {
    const int dim = tkvi_geometry_of(kv, layer)->head_dim;
    return tkvi_formats[format].shared &&
           (dim % kv->tables.cfg.format.allocation_unit || (dim == 4 && tkvi_formats[format].bits < 12));
}

/* The layout of a run of blocks in this cache, of version 0 if it has a table. -1: it has none. is_cache: the run names
 * its layout. */
static int tkvi_layout_of_saved(const tkv_cache *kv, int layer, const uint8_t *run, int is_cache) {
    const tkvi_plan *p = &kv->tables.plan[layer];
    const tkvi_tier_spec *specs = tkvi_tier_specs_of(&kv->tables, layer);
    const int has_version = run[4] != TKVI_NO_VERSION,
              named = is_cache ? tkvi_load16(run + 24) - (has_version ? run[4] : 0) : -1;
    int i, tier;
    if (has_version) {
        for (i = 0; i < kv->tables.n_levels; i++)
            for (tier = 0; tier < TKV_TIER_COUNT; tier++) {
                const tkvi_layout *c = &kv->tables.layout[specs[i].layout[tier]];
                if (specs[i].needs_table[tier] && c->pair.k == (tkv_format)run[0] &&
                    c->pair.v == (tkv_format)run[1] && c->tokens == run[2] &&
                    (!is_cache || specs[i].layout[tier] == named))
                    return specs[i].layout[tier];
            }
        return -1;
    }
    for (i = 0; i < kv->tables.n_keys; i++) {
        const tkvi_layout *c = &kv->tables.layout[i];
        const tkvi_side *k = &c->record[0].k;
        if ((!is_cache || i == named) && c->pair.k == (tkv_format)run[0] && c->pair.v == (tkv_format)run[1] &&
            c->tokens == run[2] && c->n_kv_heads == p->geometry.n_kv_heads &&
            k->dim == p->geometry.head_dim && c->record[0].v.dim == p->geometry.v_head_dim &&
            tkvi_is_view(&c->record[0].v) == p->geometry.v_in_k && !tkvi_pair_allocates(c->pair) &&
            !tkvi_pair_token_parts(c->pair))
            return i;
    }
    return -1;
}

#endif /* TKVI_PERSIST_SAVED_H */
