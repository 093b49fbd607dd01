/* The list of parts, in reading order. tools/amalgamate.py turns it into ../../tieredkv_cuda.cu. */
#include "api.h"
#if !defined(TKVCU_INTERFACE_ONLY) && !defined(TKVCU_IMPLEMENTED)
#define TKVCU_IMPLEMENTED
#include "layout.h"
#include "warp.h"
#include "encode.h"
#include "append.h"
#include "unpack.h"
#include "attend.h"
#include "combine.h"
#include "prefill.h"
#include "create.h"
#include "transfer.h"
#include "calls.h"
#endif /* TKVCU_INTERFACE_ONLY */
