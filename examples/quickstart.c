/*
 * quickstart.c - fills a cache token by token, computes attention at each step, and prints how many tokens each tier
 * holds.
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

static void fill(float *x, int n) { /* random numbers stand in for a model */
    for (int i = 0; i < n; i++) x[i] = (float)rand() / (float)RAND_MAX - 0.5f;
}

int main(void) {
    tkv_config cfg =
        tkv_default_config(); /* in C, `= {0}` does the same: zero means default in every field */
    cfg.model.n_layers = 4;
    cfg.model.n_heads = 32;   /* query heads */
    cfg.model.n_kv_heads = 8; /* four query heads share one head of K and V */
    cfg.model.head_dim = 128;
    tkv_cache *kv = NULL;
    char reason[512]; /* receives a sentence that names the wrong field */
    const tkv_status created = tkv_create_ex(&cfg, NULL, 0, &kv, reason, sizeof reason);
    if (created != TKV_OK) {
        fprintf(stderr, "%s\n", reason);
        return 1;
    }

    static float q[32 * 128], k[8 * 128], v[8 * 128], out[32 * 128];
    for (int token = 0; token < 2000; token++) {
        for (int layer = 0; layer < cfg.model.n_layers; layer++) {
            fill(q, 32 * 128);
            fill(k, 8 * 128);
            fill(v, 8 * 128);
            check(tkv_append(kv, 0, layer, k, v, 1));   /* stores K and V of this token */
            check(tkv_attend(kv, 0, layer, q, 1, out)); /* computes softmax(q K) V over all tokens so far */
        }
    }

    tkv_layer_info tiers;
    check(tkv_get_layer(kv, 0, 0, &tiers));
    tkv_memory_info mem;
    check(tkv_get_memory(kv, &mem));
    printf("%d tokens: %d hot, %d warm, %d archive\n", tkv_get_length(kv, 0, TKV_ALL_LAYERS),
           tiers.tokens[TKV_TIER_HOT], tiers.tokens[TKV_TIER_WARM], tiers.tokens[TKV_TIER_ARCHIVE]);
    printf("%.0f bytes, %.2f times smaller than FP16\n", (double)mem.total, mem.ratio);
    tkv_destroy(kv);
    return 0;
}
