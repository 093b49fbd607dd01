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
#include "logscale.h"
#include "rotate.h"
#include "rope.h"
#include "tile.h"
#include "minifloat.h"
#include "fit.h"
#include "codebook.h"
#include "allocate.h"
#include "format.h"
#include "format_exact.h"
#include "format_tiles.h"
#include "format_kivi.h"
#include "format_squat.h"
#include "format_subspace.h"
#include "format_a.h"
#include "format_r.h"
#include "format_kvquant.h"
#include "format_token.h"
#include "format_int.h"
#include "format_float.h"
#include "format_table.h"
#include "kernels.h"
#include "kernels_x86.h"
#include "decode_x86.h"
#include "turn_x86.h"
#include "values_x86.h"
#include "groups_x86.h"
#include "kernels_avx2.h"
#include "kernels_avx512.h"
#include "kernels_neon.h"
#include "kernels_wasm.h"
#include "kernels_128.h"
#include "dispatch.h"
#include "many.h"
#include "many_avx512.h"
#include "plan.h"
#include "preset.h"
#include "policy.h"
#include "pool.h"
#include "meter.h"
#include "cache.h"
#include "kvquant.h"
#include "learn.h"
#include "metric.h"
#include "sequence.h"
#include "calibration.h"
#include "attend.h"
#include "reference.h"
#include "report.h"
#include "decimal.h"
#include "text.h"
#include "state.h"
#include "end.h"
#ifdef __cplusplus
}
#endif
#endif /* TIEREDKV_IMPLEMENTATION */
