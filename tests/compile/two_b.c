/* The other file of two_a.c. */
#include "exercise.h"

int other_file(void);

int other_file(void) { return exercise(); }
