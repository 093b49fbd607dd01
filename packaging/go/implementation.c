#define TIEREDKV_IMPLEMENTATION
#include "tieredkv.h"
