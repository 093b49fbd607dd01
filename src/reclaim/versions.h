/*
 * reclaim/versions.h - frees versions of a layer's table. A block keeps the version that it was coded with, and there
 * are TKVI_VERSIONS of them. So a new table can need the version of old blocks, which are then coded again.
 *
 * Tables are made when the number of tokens has doubled. So the oldest version has few blocks: of 8,192 tokens those of
 * the first table are about 256. Coding them again adds about the error that they have, once.
 */
#ifndef TKVI_RECLAIM_VERSIONS_H
#define TKVI_RECLAIM_VERSIONS_H

#include "reclaim/stale.h"

/* Codes each block of the layer that has `version` again, with the current version. Returns 0 without memory. */
static int tkvi_recode_version(tkv_cache *kv, int layer, int version) {
    const int current = kv->tables.current_version[layer];
    int seq, i, is_packed;
    for (seq = 0; seq < kv->tables.cfg.limits.max_seqs; seq++) {
        const tkvi_list *list = tkvi_list_of(kv, seq, layer);
        const uint32_t *ids = tkvi_ids(kv, seq, layer);
        for (i = 0; i < list->n; i++) {
            const tkvi_block *b = tkvi_block_of(kv, ids[i]);
            const int layout = b->layout - version + current;
            tkvi_recoding r;
            if (tkvi_version_of(kv, b->layout) != version) continue;
            if (!tkvi_provide_slot(&kv->pool, kv->tables.layout[layout].size_class)) return 0;
            r = tkvi_describe_recoding(kv, layer, list, ids, i, layout, &is_packed);
            tkvi_keep_slots(&r, list, ids, i);
            tkvi_recode_block(&kv->pool, kv->pool.entry[ids[i]].block, layout, tkvi_recode_heads, &r);
        }
    }
    return 1;
}

/* Frees a version of the layer's table for a new one, if all are in use: codes the blocks of one again with the current
 * version. It takes the version of the fewest blocks, which is the oldest as a rule. A version stays that a block
 * outside RAM has. */
static void tkvi_retire_version(tkv_cache *kv, int layer) {
    int n[TKVI_VERSIONS] = {0}, outside[TKVI_VERSIONS] = {0}, seq, i, v, fewest = -1;
    if (tkvi_free_version(kv, layer) >= 0 || tkvi_has_open_step(kv)) return;
    for (seq = 0; seq < kv->tables.cfg.limits.max_seqs; seq++) {
        const tkvi_list *list = tkvi_list_of(kv, seq, layer);
        const uint32_t *ids = tkvi_ids(kv, seq, layer);
        for (i = 0; i < list->n; i++) {
            const tkvi_block *b = tkvi_block_of(kv, ids[i]);
            const int version = tkvi_version_of(kv, b->layout);
            if (version < 0) continue;
            n[version]++;
            outside[version] |= tkvi_is_offloaded(b);
        }
    }
    outside[(int)kv->tables.current_version[layer]] = 1;
    for (v = 0; v < TKVI_VERSIONS; v++)
        if (n[v] && !outside[v] && (fewest < 0 || n[v] < n[fewest])) fewest = v;
    if (fewest >= 0) (void)tkvi_recode_version(kv, layer, fewest);
}

/* As tkvi_make_due_table. First it frees a version for the table, if none is free. */
static int tkvi_renew_table(tkv_cache *kv, int layer, int n) {
    if (kv->tables.current_version[layer] >= 0 && tkvi_n_heads_due(kv, layer, n) &&
        !kv->stats.next_table[layer].n_heads)
        tkvi_retire_version(kv, layer);
    return tkvi_make_due_table(kv, layer, n);
}

#endif /* TKVI_RECLAIM_VERSIONS_H */
