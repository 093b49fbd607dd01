/*
 * quickstart.c - a cache, a loop of append and attend, and where the tokens are afterwards.
 *
 * cc -O2 -o quickstart examples/quickstart.c examples/tieredkv.c -lm && ./quickstart
 */
#include "../tieredkv.h"

#include <stdio.h>
#include <stdlib.h>

static void check(tkv_status status) {
    if (status == TKV_OK) return;
    fprintf(stderr, "%s\n", tkv_get_status_text(status));
    exit(1);
}

static void fill(float *x, int n) { /* a model would be here */
    while (n--) *x++ = (float)rand() / (float)RAND_MAX - 0.5f;
}

int main(void) {
    static float q[32 * 128], k[8 * 128], v[8 * 128], out[32 * 128];
    tkv_config cfg = tkv_default_config(); /* in C also: = {0}. Zero means default, everywhere */
    tkv_cache *kv;
    tkv_layer_info tiers;
    tkv_memory_info mem;
    char reason[200];
    int token, layer;

    cfg.model.n_layers = 4;
    cfg.model.n_heads = 32;   /* query heads */
    cfg.model.n_kv_heads = 8; /* four query heads share one head of K and V */
    cfg.model.head_dim = 128;
    if (tkv_create_ex(&cfg, NULL, 0, &kv, reason, sizeof reason) !=
        TKV_OK) { /* the sentence names the field */
        fprintf(stderr, "%s\n", reason);
        return 1;
    }

    for (token = 0; token < 2000; token++) {
        for (layer = 0; layer < cfg.model.n_layers; layer++) {
            fill(q, 32 * 128), fill(k, 8 * 128), fill(v, 8 * 128);
            check(tkv_append(kv, 0, layer, k, v, 1));   /* store this token's K and V */
            check(tkv_attend(kv, 0, layer, q, 1, out)); /* softmax(q K) V over all tokens so far */
        }
    }

    check(tkv_get_layer(kv, 0, 0, &tiers));
    check(tkv_get_memory(kv, &mem));
    printf("%d tokens: %d hot, %d warm, %d archive\n", tkv_get_length(kv, 0, TKV_ALL_LAYERS),
           tiers.tokens[TKV_TIER_HOT], tiers.tokens[TKV_TIER_WARM], tiers.tokens[TKV_TIER_ARCHIVE]);
    printf("%.0f bytes, %.2f times smaller than FP16\n", (double)mem.total, mem.ratio);
    tkv_destroy(kv);
    return 0;
}
