/* The list of parts, in reading order. tools/amalgamate.py turns it into ../tieredkv.h. */
#include "doc.h"

#include "api.h"

/* Outside the include guard: a header may have been included first without the implementation. */
#if defined(TIEREDKV_IMPLEMENTATION) && !defined(TKVI_IMPLEMENTED)
#define TKVI_IMPLEMENTED
#ifdef __cplusplus
extern "C" {
#endif
#include "base.h"
#include "tile.h"
#include "format.h"
#include "format_exact.h"
#include "format_kivi.h"
#include "format_table.h"
#include "kernels.h"
#include "kernels_x86.h"
#include "kernels_avx2.h"
#include "kernels_avx512.h"
#include "dispatch.h"
#include "plan.h"
#include "pool.h"
#include "cache.h"
#include "sequence.h"
#include "attend.h"
#include "reference.h"
#include "report.h"
#include "end.h"
#ifdef __cplusplus
}
#endif
#endif /* TIEREDKV_IMPLEMENTATION */
