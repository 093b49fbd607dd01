/*
 * core/switches.h - turns the compile-time switches (OPTIONS in the manual) into constants, 0 or 1. A switch leaves
 * out code, never a declaration or a field. Code asks the constant, so every build checks all code, and the compiler
 * drops what can never run:
 *
 *     if (TKVI_HAS_METER && kv->meter) ...                        a branch
 *     {"h2o", ..., TKVI_IF(TKVI_HAS_EVICT, tkvi_score_attention)}   a row of a table: NULL keeps no function alive
 *
 * A public function that is left out begins with a refusal: TKV_ERR_UNSUPPORTED and a sentence with the switch.
 */
#ifndef TKVI_CORE_SWITCHES_H
#define TKVI_CORE_SWITCHES_H

#if defined(TKV_CORE) || defined(TKV_NO_KVQUANT)
#define TKVI_HAS_KVQUANT 0
#else
#define TKVI_HAS_KVQUANT 1
#endif

#if defined(TKV_CORE) || defined(TKV_NO_SQUAT)
#define TKVI_HAS_SQUAT 0
#else
#define TKVI_HAS_SQUAT 1
#endif

#if defined(TKV_CORE) || defined(TKV_NO_TOKEN_FORMATS)
#define TKVI_HAS_TOKEN_FORMATS 0
#else
#define TKVI_HAS_TOKEN_FORMATS 1
#endif

#if defined(TKV_CORE) || defined(TKV_NO_SUBSPACE)
#define TKVI_HAS_SUBSPACE 0
#else
#define TKVI_HAS_SUBSPACE 1
#endif

#if defined(TKV_CORE) || defined(TKV_NO_EVICT)
#define TKVI_HAS_EVICT 0
#else
#define TKVI_HAS_EVICT 1
#endif

#if defined(TKV_CORE) || defined(TKV_NO_OFFLOAD)
#define TKVI_HAS_OFFLOAD 0
#else
#define TKVI_HAS_OFFLOAD 1
#endif

#if defined(TKV_CORE) || defined(TKV_NO_DISCARD)
#define TKVI_HAS_DISCARD 0
#else
#define TKVI_HAS_DISCARD 1
#endif

#ifdef TKV_NO_REPORTS
#define TKVI_HAS_REPORTS 0
#else
#define TKVI_HAS_REPORTS 1
#endif

#if defined(TKV_CORE) || defined(TKV_NO_SAVE)
#define TKVI_HAS_SAVE 0
#else
#define TKVI_HAS_SAVE 1
#endif

#if defined(TKV_CORE) || defined(TKV_NO_METER)
#define TKVI_HAS_METER 0
#else
#define TKVI_HAS_METER 1
#endif

#if defined(TKV_CORE) || defined(TKV_NO_MOVES)
#define TKVI_HAS_MOVES 0
#else
#define TKVI_HAS_MOVES 1
#endif

#if defined(TKV_CORE) || defined(TKV_NO_STATES)
#define TKVI_HAS_STATES 0
#else
#define TKVI_HAS_STATES 1
#endif

#if defined(TKV_CORE) || defined(TKV_NO_APPEND_PARTS)
#define TKVI_HAS_APPEND_PARTS 0
#else
#define TKVI_HAS_APPEND_PARTS 1
#endif

/* Formats that attention decodes. */
#define TKVI_HAS_DECODED (TKVI_HAS_KVQUANT || TKVI_HAS_TOKEN_FORMATS || TKVI_HAS_SUBSPACE)
/* Blocks without a slot in RAM: offloaded or discarded. */
#define TKVI_HAS_BLOCKS_OUTSIDE_RAM (TKVI_HAS_OFFLOAD || TKVI_HAS_DISCARD)

/* Blocks that stay in a saved file. */
#define TKVI_HAS_ATTACH (TKVI_HAS_OFFLOAD && TKVI_HAS_SAVE)
#define TKVI_HAS_PREFIXES (TKVI_HAS_SAVE && TKVI_HAS_MOVES)

/* A function for a row of a table; NULL if `has` is 0. */
#define TKVI_IF(has, function) ((has) ? (function) : NULL)

#endif /* TKVI_CORE_SWITCHES_H */
