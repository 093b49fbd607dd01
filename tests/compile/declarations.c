/* The declarations alone: all that a program's other files see. */
#include "../../tieredkv.h"

int declarations(const tkv_cache *kv);

int declarations(const tkv_cache *kv) { return tkv_version() == TKV_VERSION && tkv_seq_len(kv, 0) == 0; }
