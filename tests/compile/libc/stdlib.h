/* All that the library takes from <stdlib.h>; nothing with TKV_NO_MALLOC. */
#include <stddef.h>

#ifdef __cplusplus
extern "C" {
#endif
void free(void *p);
void *malloc(size_t n);
#ifdef __cplusplus
}
#endif
