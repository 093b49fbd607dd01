/*
 * reclaim/wipe.h - overwrites keys and values in blocks that stay (cfg.host.wipe_freed). A slot is wiped once no entry
 * of any list has a token there. Slots of freed blocks are wiped by cache/pool.h.
 */
#ifndef TKVI_RECLAIM_WIPE_H
#define TKVI_RECLAIM_WIPE_H

#include "reclaim/anchors.h"

/* Overwrites the slots of an exact block in RAM that have no token of any list. Block `number` is or was block i of a
 * list of the layer. */
static TKVI_NOINLINE void tkvi_wipe_unused(tkv_cache *kv, int layer, uint32_t number, int i) {
    const tkvi_block *b = &kv->pool.block[number];
    const tkvi_layout *layout = &kv->tables.layout[b->layout];
    uint64_t used;
    int t, h;
    if (!kv->tables.cfg.host.wipe_freed || !b->refs || tkvi_is_offloaded(b) ||
        !tkvi_is_exact(layout->record[0].k.format) || !tkvi_is_exact(layout->record[0].v.format))
        return;
    used = tkvi_slots_with_tokens(kv, layer, number, i);
    for (t = 0; t < layout->tokens; t++)
        for (h = 0; h < layout->n_kv_heads && !(used >> t & 1); h++) {
            const tkvi_record *r = &layout->record[h];
            uint8_t *bytes = tkvi_block_bytes(&kv->pool, b) + r->at;
            tkvi_put_token(&r->k, kv->kernels->simd_ops, tkvi_zeros, t, bytes);
            tkvi_put_token(&r->v, kv->kernels->simd_ops, tkvi_zeros, t, bytes + r->v_at);
        }
}

/* Call before block i leaves its list, if others hold it. Overwrites what only this list has a token in. The entry has
 * no tokens then. */
static void tkvi_wipe_before_release(tkv_cache *kv, int seq, int layer, int i) {
    const uint32_t id = tkvi_ids(kv, seq, layer)[i];
    if (!kv->tables.cfg.host.wipe_freed || tkvi_block_of(kv, id)->refs == 1) return;
    kv->pool.entry[id].evicted_mask = ~(uint64_t)0;
    if (TKVI_HAS_EVICT && kv->pool.token_meta) kv->pool.token_meta[id].anchored_mask = 0;
    tkvi_wipe_unused(kv, layer, kv->pool.entry[id].block, i);
}

#endif /* TKVI_RECLAIM_WIPE_H */
