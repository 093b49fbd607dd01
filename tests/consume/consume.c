#include "tieredkv.h"
#include <stdio.h>

int main(void) {
    float x[2 * 64] = {1}, out[2 * 64]; /* q, k and v of a model with 2 heads of 64 channels */
    tkv_config cfg = tkv_default_config();
    tkv_memory_info mem;
    tkv_cache *kv;
    cfg.model.n_layers = 1, cfg.model.n_heads = 2, cfg.model.head_dim = 64;
    if (tkv_create(&cfg, &kv)) return 1;
    for (int i = 0; i < 1000; i++)
        if (tkv_append(kv, 0, 0, x, x, 1) || tkv_attend(kv, 0, 0, x, 1, out)) return 1;
    if (tkv_get_memory(kv, &mem)) return 1;
    printf("%zu hot, %zu warm, %zu archive, %zu bytes, out %.1f\n", mem.tier[TKV_TIER_HOT].tokens,
           mem.tier[TKV_TIER_WARM].tokens, mem.tier[TKV_TIER_ARCHIVE].tokens, mem.total, (double)out[0]);
    tkv_destroy(kv);
    return 0;
}
