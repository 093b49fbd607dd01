/*
 * One program of two files, this one and two_b.c, in three ways:
 *   both with -DTKV_STATIC              each file has its own copy that nobody else sees
 *   -DTKV_PREFIX=a_ and -DTKV_PREFIX=b_, both with -DTIEREDKV_IMPLEMENTATION     two copies side by side
 *   neither, with examples/tieredkv.c as third file  one copy
 */
#include "exercise.h"

int other_file(void);

int main(void) { return exercise() || other_file(); }
