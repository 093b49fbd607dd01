/* All that the library takes from <string.h>. These three headers stand for a libc that is not there: a freestanding
 * machine, or that of MSVC. Chapter 17 of the manual has the same list. */
#include <stddef.h>

#ifdef __cplusplus
extern "C" {
#endif
int memcmp(const void *a, const void *b, size_t n);
void *memcpy(void *to, const void *from, size_t n);
void *memmove(void *to, const void *from, size_t n);
void *memset(void *to, int byte, size_t n);
int strcmp(const char *a, const char *b);
size_t strlen(const char *text);
#ifdef __cplusplus
}
#endif
