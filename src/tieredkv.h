/* The list of parts, in reading order. tools/amalgamate.py turns it into ../tieredkv.h. */
#include "manual.h"

#include "prefix.h"
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
#include "core/switches.h"
#include "core/base.h"
#include "core/parts.h"
#include "core/decimal.h"
#include "core/checksum.h"
#include "core/sha256.h"
#include "core/log_scale.h"
#include "core/rotate.h"
#include "core/geometry.h"
#include "core/rope.h"
#include "core/tile.h"
#include "core/minifloat.h"
#include "core/fit.h"
#include "core/codebook.h"
#include "core/allocate.h"
#include "core/family.h"
#include "core/field.h"
#include "core/format.h"
#include "formats/exact.h"
#include "formats/tiles.h"
#include "formats/kivi.h"
#include "formats/squat.h"
#include "formats/subspace.h"
#include "formats/a.h"
#include "formats/r.h"
#include "formats/kvquant.h"
#include "formats/kvquant_tables.h"
#include "formats/token.h"
#include "formats/int.h"
#include "formats/float.h"
#include "formats/table.h"
#include "formats/families.h"
#include "kernels/scalar.h"
#include "kernels/x86.h"
#include "kernels/simd_x86.h"
#include "kernels/neon.h"
#include "kernels/wasm.h"
#include "kernels/code_rows.h"
#include "kernels/prefill.h"
#include "kernels/tiles.h"
#include "kernels/avx2.h"
#include "kernels/avx512.h"
#include "kernels/vectors_128.h"
#include "kernels/dispatch.h"
#include "rules/pressure.h"
#include "rules/select.h"
#include "rules/importance.h"
#include "rules/evict_policy.h"
#include "rules/evict_sliding.h"
#include "rules/evict_h2o.h"
#include "rules/evict_tova.h"
#include "rules/evict_knorm.h"
#include "rules/evict_keydiff.h"
#include "rules/evict_scissorhands.h"
#include "rules/evict_snapkv.h"
#include "rules/evict_pyramidkv.h"
#include "rules/evict_random.h"
#include "rules/evict_given.h"
#include "rules/evict.h"
#include "rules/score_modes.h"
#include "rules/remat.h"
#include "cache/plan.h"
#include "cache/preset.h"
#include "cache/pool.h"
#include "cache/meter.h"
#include "cache/states.h"
#include "cache/turns.h"
#include "cache/cache.h"
#include "cache/consumers.h"
#include "cache/lookup.h"
#include "learn/feedback.h"
#include "learn/thresholds.h"
#include "learn/tokens.h"
#include "learn/statistics.h"
#include "learn/query_stats.h"
#include "learn/sample_queries.h"
#include "learn/calibration.h"
#include "reclaim/scores.h"
#include "reclaim/sample_scores.h"
#include "reclaim/offload.h"
#include "reclaim/discard.h"
#include "reclaim/anchors.h"
#include "reclaim/wipe.h"
#include "reclaim/age.h"
#include "reclaim/evict_tokens.h"
#include "reclaim/demand.h"
#include "reclaim/stale.h"
#include "reclaim/versions.h"
#include "reclaim/budget.h"
#include "reclaim/adapt.h"
#include "attention/attend.h"
#include "attention/compare.h"
#include "attention/score_output.h"
#include "attention/reference.h"
#include "step/consumers.h"
#include "step/shrink.h"
#include "step/promote.h"
#include "step/ranking.h"
#include "step/promotion.h"
#include "step/sequence.h"
#include "step/append_parts.h"
#include "step/pins.h"
#include "step/sinks.h"
#include "step/states.h"
#include "step/fork.h"
#include "step/reorder.h"
#include "step/turns.h"
#include "step/move.h"
#include "step/slide.h"
#include "step/keep.h"
#include "step/recompute.h"
#include "report/info.h"
#include "report/text.h"
#include "report/levels.h"
#include "report/create.h"
#include "report/state.h"
#include "persist/saved.h"
#include "persist/scratch.h"
#include "persist/whole.h"
#include "persist/save.h"
#include "persist/reader.h"
#include "persist/verify.h"
#include "persist/place.h"
#include "persist/load_cache.h"
#include "persist/load.h"
#include "persist/prefix.h"
#include "persist/end.h"
#ifdef __cplusplus
}
#ifdef __clang__
#pragma clang diagnostic pop
#endif
#endif
#endif /* TIEREDKV_IMPLEMENTATION */
