/* The list of parts, in reading order. tools/amalgamate.py turns it into ../tieredkv.h. */
#include "doc.h"

#include "api.h"

/* Outside the include guard, as the next part is: all includes must have the same TKV_PREFIX. */
#ifndef TKVI_INCLUDED
#define TKVI_INCLUDED
#ifdef TKV_PREFIX
#define TKVI_HAS_PREFIX
enum { TKV_NAME_(must_be_the_TKV_PREFIX_of_the_first_include) = 1 };
#endif
#elif defined(TKV_PREFIX) && !defined(TKVI_HAS_PREFIX)
#error "TKV_PREFIX was not defined at the first include of tieredkv.h. Define it before that, or use -D."
#elif !defined(TKV_PREFIX) && defined(TKVI_HAS_PREFIX)
#error "TKV_PREFIX was defined at the first include of tieredkv.h. Keep it defined until the last, or use -D."
#elif defined(TKV_PREFIX)
/* The preprocessor cannot compare names. This one is unknown to the compiler if the prefix is another one. */
extern char tkvi_same_prefix[TKV_NAME_(must_be_the_TKV_PREFIX_of_the_first_include)];
#endif

/* Outside the include guard: a header may have been included first without the implementation. */
#if defined(TIEREDKV_IMPLEMENTATION) && !defined(TKVI_IMPLEMENTED)
#define TKVI_IMPLEMENTED
#ifdef __cplusplus
#ifdef __clang__ /* This is C. gcc exempts extern "C" from both warnings itself. */
#pragma clang diagnostic push
#pragma clang diagnostic ignored "-Wold-style-cast"
#pragma clang diagnostic ignored "-Wzero-as-null-pointer-constant"
#endif
extern "C" {
#endif
#include "base.h"
#include "checksum.h"
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
#include "policy.h"
#include "select.h"
#include "importance.h"
#include "evict_policy.h"
#include "evict_sliding.h"
#include "evict_h2o.h"
#include "evict_tova.h"
#include "evict_knorm.h"
#include "evict_keydiff.h"
#include "evict_scissorhands.h"
#include "evict_snapkv.h"
#include "evict_pyramidkv.h"
#include "evict_random.h"
#include "evict_given.h"
#include "evict.h"
#include "mass_mode.h"
#include "remat.h"
#include "plan.h"
#include "preset.h"
#include "feedback.h"
#include "thresholds.h"
#include "pool.h"
#include "meter.h"
#include "cache.h"
#include "kvquant.h"
#include "learn.h"
#include "metric.h"
#include "mass.h"
#include "spill.h"
#include "absent.h"
#include "anchor.h"
#include "age.h"
#include "drop.h"
#include "budget.h"
#include "adapt.h"
#include "sequence.h"
#include "keep.h"
#include "promote.h"
#include "recompute.h"
#include "calibration.h"
#include "attend.h"
#include "ranking.h"
#include "promotion.h"
#include "reference.h"
#include "report.h"
#include "decimal.h"
#include "text.h"
#include "create.h"
#include "state.h"
#include "end.h"
#ifdef __cplusplus
}
#ifdef __clang__
#pragma clang diagnostic pop
#endif
#endif
#endif /* TIEREDKV_IMPLEMENTATION */
