/* First without the macro, as when another header brought it in, then with it, then once more. */
#include "../../tieredkv.h"
#define TIEREDKV_IMPLEMENTATION
#include "../../tieredkv.h"

#include "../../tieredkv.h"

#include "exercise.h"

int main(void) { return exercise(); }
