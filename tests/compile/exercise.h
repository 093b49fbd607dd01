/*
 * exercise.h - the smallest use of the library that goes through all tiers. exercise() returns 0, or 1 and
 * prints the line that went wrong.
 */
#include "../../tieredkv.h"

#include <stdio.h>
#include <string.h>

#define EXERCISE(cond)                                                                                       \
    do {                                                                                                     \
        if (!(cond)) {                                                                                       \
            printf("%s:%d: %s\n", __FILE__, __LINE__, #cond);                                                \
            return 1;                                                                                        \
        }                                                                                                    \
    } while (0)

enum { EXERCISE_TOKENS = 700, EXERCISE_DIM = 16 }; /* beyond 4 + 64 + 448: some reach the archive */

static int exercise(void) {
    tkv_config cfg = tkv_default_config();
    tkv_cache *kv = NULL;
    tkv_attend_params p;
    tkv_layer_info tiers;
    float row[EXERCISE_DIM], out[EXERCISE_DIM], ref[EXERCISE_DIM], size = 0.0f;
    int i, t;
#ifdef TKV_NO_MALLOC
    static unsigned char memory[1 << 20];
    size_t bytes = 0;
#endif
    cfg.model.n_layers = 1;
    cfg.model.n_heads = 1;
    cfg.model.head_dim = EXERCISE_DIM;
    cfg.limits.max_tokens = 1024;
#ifdef TKV_NO_MALLOC
    EXERCISE(tkv_create(&cfg, &kv) != TKV_OK); /* nothing to allocate with */
    EXERCISE(tkv_get_required_bytes(&cfg, &bytes, NULL) == TKV_OK);
    EXERCISE(bytes <= sizeof memory);
    EXERCISE(tkv_create_in_place(&cfg, memory, bytes, &kv, NULL, 0) == TKV_OK);
#else
    EXERCISE(tkv_create(&cfg, &kv) == TKV_OK);
#endif
    for (t = 0; t < EXERCISE_TOKENS; t++) {
        for (i = 0; i < EXERCISE_DIM; i++)
            row[i] = (float)((t * EXERCISE_DIM + i) * 7919 % 257 - 128) * 0.01f;
        EXERCISE(tkv_append(kv, 0, 0, row, row, 1) == TKV_OK);
    }
    EXERCISE(tkv_get_length(kv, 0, TKV_ALL_LAYERS) == EXERCISE_TOKENS);
    EXERCISE(tkv_get_layer(kv, 0, 0, &tiers) == TKV_OK);
    EXERCISE(tiers.tokens[TKV_TIER_HOT] > 0 && tiers.tokens[TKV_TIER_WARM] > 0 &&
             tiers.tokens[TKV_TIER_ARCHIVE] > 0);
    EXERCISE(tkv_attend(kv, 0, 0, row, 1, out) == TKV_OK);
    memset(&p, 0, sizeof p);
    p.n = 1;
    p.q = row;
    p.out = ref;
    EXERCISE(tkv_attend_reference(kv, &p) == TKV_OK);
    for (i = 0; i < EXERCISE_DIM; i++) {
        float d = out[i] - ref[i];
        size += ref[i] * ref[i];
        EXERCISE(d * d <= 1e-4f); /* wide: the point here is that it runs */
    }
    EXERCISE(size > 1e-3f);
    EXERCISE(tkv_check(kv, NULL, 0) == TKV_OK);
    tkv_destroy(kv);
    return 0;
}
