/*
 * white.h - the internal functions of the library, for white-box tests (tests/white_x.c, one for a folder of src).
 *
 * A white-box test compiles the internal functions that it calls. Public functions come from the linked library:
 *
 *     cc -O2 tests/white_x.c examples/tieredkv.c -o white_x -lm && ./white_x
 *
 * gcc and clang never emit the body of a gnu_inline function that is not inlined. gcc needs O0 for that, clang
 * noinline. So they drop the body and all that only it calls, and a white-box test compiles in two seconds in the place
 * of ten. clang drops it after the first optimizations, and at -O0 before them. With other compilers a white-box test
 * contains the whole library, and what is linked is not used.
 */
#ifndef WHITE_H
#define WHITE_H

#if defined(TKV_STATIC) /* the test contains what it uses of the library: tools/mutate.py */
#elif defined(__clang__)
#pragma GCC system_header /* these inline functions call static ones, and compilers warn about that */
#define TKV_API extern inline __attribute__((gnu_inline, noinline))
#elif defined(__GNUC__)
#pragma GCC system_header
#define TKV_API extern inline __attribute__((gnu_inline, optimize("O0")))
#else
#define TKV_STATIC
#endif
#include <assert.h>
#define TKV_ASSERT(condition) assert(condition)
#define TIEREDKV_IMPLEMENTATION
#include "../tieredkv.h"

#endif /* WHITE_H */
