/*
 * macros.h - names that other headers define as macros: <windows.h> and rpc.h, X11's Xlib.h, <complex.h>. With
 * `-include tests/compile/macros.h` they stand before the library, as a program's headers may. The system headers
 * that the library includes come first, since they would break too. tests/test_house.py reads the names here and
 * refuses them as identifiers in the whole tree.
 */
#ifndef MACROS_H
#define MACROS_H

#include <float.h>
#include <math.h>
#include <stddef.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>
#if defined(__x86_64__) || defined(__i386__)
#include <immintrin.h>
#elif defined(__ARM_NEON)
#include <arm_neon.h>
#elif defined(__wasm_simd128__)
#include <wasm_simd128.h>
#endif

/* <windows.h> and the headers that it includes. */
#define far
#define near
#define FAR
#define NEAR
#define pascal
#define cdecl
#define CALLBACK
#define IN
#define OUT
#define OPTIONAL
#define CONST const
#define VOID void
#define BOOL int
#define TRUE 1
#define FALSE 0
#define ERROR 0
#define NO_ERROR 0
#define DELETE (0x00010000L)
#define OPAQUE 2
#define TRANSPARENT 1
#define ABSOLUTE 1
#define RELATIVE 2
#define IGNORE 0
#define INFINITE 0xffffffff
#define STRICT 1
#define small char
#define hyper long long
#define interface struct
#define grp1 0x0430
#define grp2 0x0431
#define grp3 0x0432
#define grp4 0x0433
#define rad1 0x0420
#define rad2 0x0421
#define rad3 0x0422
/* There they take arguments. Here each use fails, so that a call, too, is noticed in every language. */
#define min struct
#define max struct

/* Xlib.h and X.h. */
#define Bool int
#define Status int
#define True 1
#define False 0
#define None 0L
#define Always 2
#define Above 0
#define Below 1
#define Success 0
#define Complex 0
#define Convex 2
#define Nonconvex 1
#define Unsorted 0

/* <complex.h>. */
#define I (__extension__ 1.0iF)
#define complex _Complex

#endif /* MACROS_H */
