/*
 * white.h - the internal functions of the library, for white-box tests (tests/white_x.c, one for a folder of src).
 *
 * A white-box test compiles the internal functions that it calls. Public functions come from the linked library:
 *
 *     cc -O2 tests/white_x.c examples/tieredkv.c -o white_x -lm && ./white_x
 *
 * gcc never emits the body of a gnu_inline function, and O0 keeps it from being inlined. So gcc drops the body and all
 * that only it calls, and a white-box test compiles in two seconds in the place of ten. With other compilers it contains the whole library,
 * and what is linked is not used.
 */
#ifndef WHITE_H
#define WHITE_H

#if defined(__GNUC__) && !defined(__clang__)
#pragma GCC system_header /* these inline functions call static ones, and gcc warns about that */
#define TKV_API extern inline __attribute__((gnu_inline, optimize("O0")))
#else
#define TKV_STATIC
#endif
#include <assert.h>
#define TKV_ASSERT(condition) assert(condition)
#define TIEREDKV_IMPLEMENTATION
#include "../tieredkv.h"

#endif /* WHITE_H */
