/* The declarations alone: all that a program's other files see. */
#include "../../tieredkv.h"

int declarations(const tkv_cache *kv);

int declarations(const tkv_cache *kv) {
    return tkv_get_build(kv, NULL) == TKV_ERR_ARG && tkv_get_length(kv, 0, TKV_ALL_LAYERS) == 0;
}
