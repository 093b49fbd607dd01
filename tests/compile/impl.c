/* The implementation alone. */
#define TIEREDKV_IMPLEMENTATION
#include "../../tieredkv.h"
