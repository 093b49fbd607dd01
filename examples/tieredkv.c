/*
 * tieredkv.c - the library's implementation, once for a whole program. Every other file includes tieredkv.h alone.
 *
 * cc -O2 -c examples/tieredkv.c -o tieredkv.o
 */
#define TIEREDKV_IMPLEMENTATION
#include "../tieredkv.h"
