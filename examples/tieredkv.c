/*
 * tieredkv.c - compiles the library's implementation once for a whole program. Every other file of the program only
 * includes tieredkv.h.
 *
 * cc -O2 -c examples/tieredkv.c -o tieredkv.o
 */
#define TIEREDKV_IMPLEMENTATION
#include "../tieredkv.h"
