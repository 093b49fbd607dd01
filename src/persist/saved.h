/*
 * persist/saved.h - the bytes of a saved sequence. All numbers are little-endian. Sections begin at multiples of 64,
 * and the bytes between them are zero. So blocks lie in a file as they lie in a cache.
 *
 *     | head | model | tokens | tables, by layer | lists, by layer | blocks, by layer | states | index | end |
 *
 *   head     "TKVS" | u32 version | u64 bytes of all | u64 XXH64 of the model's name | u32 layers | u32 length
 *            u32 flags: 1 token_meta, 2 scores | zeros to 64
 *   model    u32 options | i32 value of each of cfg.format | for each layer:
 *            i32 layer with its K and V | u32 KV heads | u32 head_dim | u32 v_head_dim (+ 2^31: V is inside K)
 *            u64 RoPE
 *   tokens   i32 of the caller's each
 *   table    u32 parts | u32 n | n times: u32 version | u32 1: current | the parts, as in a calibration
 *   list     u32 n | u32 blocks of sinks | archive | warm | anchors | u32 length | u32 expired | u32 chunk_start
 *            u32 is_moved | u32 blocks | 2 u32 0 | entries [n] | token_meta [n], if a flag says so
 *   entry    u32 first entry with its block | i32 start | u64 evicted_mask | u64 sink_mask | i32 shift | i32 turned
 *            i8 n_packed | u8 first_slot | u8 end_slot | u8 tier | u8 has_anchors | 3 zeros
 *   meta     u64 pinned_mask | u64 temporary_mask | u64 anchored_mask | i32 temporary_until | i32 score_step
 *            i32 moved_at | u32 0 | 128 bytes: indices, 64 u16 or, in blocks of anchors, 32 i32 | scores [64] u32
 *   block    u8 format of K | u8 format of V | u8 capacity | u8 tier | u8 version of the table; 255: none | 3 zeros
 *            i32 first position; these of all blocks, zeros to 64, then the records of all
 *   state    u32 layer | u32 n_tokens | u64 bytes | the bytes, zeros to 8
 *   index    for each section: u32 kind | u32 layer | u64 offset | u64 bytes | u64 XXH64
 *   end      u64 offset of the index | u32 sections | u32 version | u64 XXH64 of the index and these 16 bytes
 *            "TKVSEND", a zero
 *
 * The checksums find accidents. They do not stop an attacker, who can compute them: authenticate files outside.
 */
#ifndef TKVI_PERSIST_SAVED_H
#define TKVI_PERSIST_SAVED_H

#include "core/checksum.h"
#include "learn/calibration.h"
#include "reclaim/versions.h"

#define TKVI_SAVED_VERSION 1
#define TKVI_SAVED_HEAD 64
#define TKVI_SAVED_LIST 48
#define TKVI_SAVED_ENTRY 40
#define TKVI_SAVED_META 168
#define TKVI_SAVED_SCORES (4 * TKVI_BLOCK)
#define TKVI_SAVED_BLOCK 12
#define TKVI_SAVED_STATE 16
#define TKVI_SAVED_SECTION 32
#define TKVI_SAVED_END 32
#define TKVI_NO_VERSION 255

enum { TKVI_SAVED_HAS_META = 1, TKVI_SAVED_HAS_SCORES = 2 };

typedef enum tkvi_saved_kind {
    TKVI_SAVED_HEAD_KIND,
    TKVI_SAVED_MODEL,
    TKVI_SAVED_TOKENS,
    TKVI_SAVED_TABLES,
    TKVI_SAVED_LISTS,
    TKVI_SAVED_BLOCKS,
    TKVI_SAVED_STATES,
    TKVI_SAVED_KINDS
} tkvi_saved_kind;

/* 1 if sections of this kind exist once for each layer with blocks of its own. */
static int tkvi_is_by_layer(int kind) { return kind >= TKVI_SAVED_TABLES && kind <= TKVI_SAVED_BLOCKS; }

/* Bytes of the record of a block: all heads, without the unused end of its slot. */
static size_t tkvi_record_bytes(const tkvi_layout *c) {
    const tkvi_record *last = &c->record[c->n_kv_heads - 1];
    return last->at + last->k.bytes + last->v.bytes;
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

/* Index in a list of the first entry that holds the block of entry i. */
static int tkvi_first_with_block(const tkv_cache *kv, const tkvi_list *list, const uint32_t *ids, int i) {
    uint32_t other = kv->pool.entry[ids[i]].next_holder;
    int first = i;
    for (; other != ids[i]; other = kv->pool.entry[other].next_holder) {
        const int at = tkvi_block_at(kv, list, ids, kv->pool.entry[other].start);
        if (at >= 0 && at < first && ids[at] == other) first = at;
    }
    return first;
}

#endif /* TKVI_PERSIST_SAVED_H */
