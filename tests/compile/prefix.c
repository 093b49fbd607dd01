/* Two includes, the second with the implementation: TKV_PREFIX is FIRST at the one and SECOND at the other. */
#ifdef FIRST
#define TKV_PREFIX FIRST
#endif
#include "../../tieredkv.h"
#undef TKV_PREFIX
#ifdef SECOND
#define TKV_PREFIX SECOND
#endif
#define TIEREDKV_IMPLEMENTATION
#include "../../tieredkv.h"
#include "../../tieredkv.h"

int prefix(const tkv_cache *kv);

int prefix(const tkv_cache *kv) { return tkv_get_length(kv, 0, TKV_ALL_LAYERS); }
