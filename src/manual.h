/* tieredkv.h - the key/value cache of a transformer in three tiers. Recent tokens are exact and older ones are
 * compressed. Attention is computed directly on the compressed bytes. The library is one header and needs only libc
 * and libm. MIT licence, see LICENSE.
 *
 * Generated from src/ by tools/amalgamate.py: edit there.
 *
 *   Do this in ONE C or C++ file:      #define TIEREDKV_IMPLEMENTATION
 *                                      #include "tieredkv.h"
 *   and in the others just:            #include "tieredkv.h"
 *   Build:                             cc -O2 program.c tieredkv.c -lm
 *                                      (tieredkv.c: the two lines above. No -m flags: kernels are chosen at run
 *                                      time)
 *
 * WHAT IT IS
 *   The library stores K and V of every layer and computes the attention over them. Tokens are stored exactly at
 *   first. When 64 of them are old enough, they are coded together: in 4 bits at first, in 3 or 2 bits later.
 *   Queries read all tiers through one softmax. In A, R, KIVI, SQUAT and Q8 formats they multiply the packed codes.
 *   The other coded formats are decoded a little at a time, on the stack; the cache never stores decoded values.
 * WHAT IT IS NOT
 *   The library contains no model, no tokenizer and no sampling. It does not apply RoPE: keys must arrive rotated
 *   (KVQUANT formats undo the rotation inside). It starts no threads, opens no files and uses no network.
 *
 * EXAMPLE
 *   tkv_config cfg = {0};                                      // zero means default, everywhere
 *   cfg.model.n_layers = 32; cfg.model.n_heads = 32; cfg.model.n_kv_heads = 8; cfg.model.head_dim = 128;
 *   tkv_cache *kv;
 *   char reason[200];                                          // which field is wrong, and what would be right
 *   if (tkv_create_ex(&cfg, NULL, 0, &kv, reason, sizeof reason) != TKV_OK) return puts(reason), 1;
 *   for each step, for each layer:
 *       tkv_append(kv, 0, layer, k, v, n);                     // [n][8][128] each, n new tokens of sequence 0
 *       tkv_attend(kv, 0, layer, q, n, out);                   // [n][32][128], causal over everything so far
 *   tkv_destroy(kv);
 *
 * OPTIONS (define them before the include; none changes a declaration or a struct)
 *   macro                    where              effect
 *   TIEREDKV_IMPLEMENTATION  one file           emits the function bodies
 *   TKV_STATIC               any, implies it    makes everything static: a private copy in this file
 *   TKV_PREFIX name_         every include      prefixes public functions: two copies in one program
 *   TKV_API decl             every include      stands before public functions (dllexport, visibility)
 *   TKV_NO_MALLOC            implementation     no malloc and free: cfg.host.allocator or tkv_create_in_place only
 *   TKV_NO_SIMD              implementation     leaves out all kernels but the scalar ones
 *   TKV_NO_AVX512            implementation     leaves out the AVX-512 kernels
 *   TKV_NO_REPORTS           implementation     leaves out configs as text, state as JSON and Prometheus
 *   TKV_NO_KVQUANT           implementation     leaves out the KVQUANT formats and what learns their tables
 *   TKV_NO_SQUAT             implementation     leaves out the SQUAT formats
 *   TKV_NO_TOKEN_FORMATS     implementation     leaves out INT8, INT4, FP8 and FP4
 *   TKV_NO_SUBSPACE          implementation     leaves out the SUBSPACE formats
 *   TKV_NO_EVICT             implementation     leaves out eviction, importance, anchors and pins
 *   TKV_NO_OFFLOAD           implementation     leaves out the store outside RAM, and promotion from it
 *   TKV_NO_DISCARD           implementation     leaves out discarding and recomputation
 *   TKV_NO_METER             implementation     leaves out quality meter, feedback and threshold store
 *   TKV_CORE                 implementation     sets the eight from TKV_NO_KVQUANT to TKV_NO_METER
 *
 *   Exact formats, Q8, KIVI, A and R, sequences, budgets, calibration and attention are in every build. What is left
 *   out is refused with TKV_ERR_UNSUPPORTED. Where there is a sentence, it names the switch, such as "tiers.archive.k
 *   is 31; TKV_NO_KVQUANT leaves this format out". Names of formats and policies stay known.
 *
 * CONCEPTS
 *   cache      all state for one model: n_layers layers, up to max_seqs sequences
 *   sequence   one conversation or beam; its tokens have positions 0, 1, 2, ... Each sequence has blocks of its
 *              own: no call shares blocks yet
 *   head group the n_heads / n_kv_heads query heads that share a KV head
 *   block      64 consecutive tokens of one layer of one sequence, all KV heads: the unit of coding and of memory
 *   record     the bytes of a block for one KV head: K codes, K metadata, V codes, V metadata
 *   format     how a block stores K or V (tkv_format); K and V are chosen separately
 *   tier       HOT: exact - the sinks (first sink_tokens) and the tail (at least hot_tokens newest)
 *              WARM: the warm_tokens before the tail, 4 bits;  ARCHIVE: everything older, 3 or 2 bits
 *   plan       formats and lengths of the tiers, per layer if wanted
 *
 *   position   0 ...... 3 | 4 ................................... | ................. | ............ now
 *   tier       sinks: HOT | ARCHIVE                               | WARM              | tail: HOT
 *
 *   An append first moves the blocks that are due, then stores the new tokens. A block is due for WARM when its
 *   newest token is hot_tokens old, and for ARCHIVE at hot_tokens + warm_tokens. A chunk is therefore exact while
 *   its own queries run. With a budget, blocks move when bytes are needed instead (tkv_get_budget).
 *
 *   offloaded  a block that lies in the caller's store, a file say; attention fetches it from there (cfg.offload)
 *   discarded  a block whose bytes were given up; the caller's model must recompute it before attention needs it
 *              (cfg.budget.discard)
 *   evicted    a token that a policy or the caller removed for good (cfg.evict, tkv_evict)
 *   expired    a token that every sliding window has passed, and that was then removed
 *
 * BYTES (drawn in full at the parts that define them: core/tile.h, formats/exact.h, formats/kivi.h)
 *   exact      [token][channel] little-endian, channels padded to 16
 *   coded      tiles of 256 codes, 1 to 6 or 8 bits each; KIVI: fp16 scale and zero per group of 64 or 32;
 *              A and R: scales of one byte, channels in an order that the cache learned (formats/a.h, formats/r.h)
 *              INT, FP, SUBSPACE: [token][channel] codes, then scales (formats/token.h, formats/subspace.h)
 *              KVQUANT: [token][channel] codes, then slots for outliers (formats/kvquant.h)
 *   tkv_encode_block gives these bytes for one head's block. They are the same on every machine and instruction
 *   set, with the compiler's default floating-point flags. They decode to the same floats under any flags.
 *
 * NUMERICS
 *   decoded value     scale * code + zero with one rounding: bit-identical everywhere
 *   attention         The reference is double precision on the decoded values. The error is at most 1e-5 for F32,
 *                     and 2e-3 for F16 and BF16. In coded tiers it is compared with the format's own error. The
 *                     ratio is at most a tenth in the root mean square over calls, and a quarter in one call of
 *                     four heads or more. A call of one head can reach half of the format's own error.
 *                     Keys of 4 bits and fewer beside values in 8 bits or exact are outside: the values
 *                     add no error of their own there, and the ratio reaches .14 and, in one call, 1.
 *                     With cfg.host.precise the error is at most 2e-3 in coded tiers as well.
 *                     These bounds hold for values up to the range of FP16 and for logits with a standard deviation
 *                     up to 4. They do not hold for one-hot softmaxes, where a near tie may fall the other way. Nor
 *                     do they hold for values that a grid holds exactly, such as +-6e4 alone. The format's own
 *                     error is 0 there, and arithmetic errs by 1e-2 of the output
 *   threads           results are bit-identical with any number of threads, and without threads
 *   not guaranteed    the same bits of attention on different instruction sets
 *
 * MEMORY
 *   All memory comes from cfg.host.allocator, as pages and a few growing tables. It is counted to the byte
 *   (tkv_get_memory). tkv_attend never allocates. An append gets all memory that it needs before it stores a
 *   token; if that fails, no token is stored. tkv_create_in_place works inside one buffer of yours and never
 *   allocates. When a budget is full (cfg.budget.bytes), old blocks are first coded in fewer bits. After that they
 *   can be offloaded: they leave RAM and stay part of attention (cfg.offload). Blocks of idle sequences can be
 *   discarded: your model recomputes them before the sequence goes on (cfg.budget.discard). Last, tokens can be
 *   evicted (cfg.evict).
 *
 * ERRORS   Every function that can fail returns a tkv_status. After an error the cache is as it was, unless the
 *          comment of the function names an exception. tkv_get_last_error gives the sentence for the last mutating
 *          call. Where there is no cache yet, tkv_create_ex writes the sentence to a buffer
 *          of yours. The latter reads a config as text.
 * THREADS  A cache allows one writer at a time. Readers may run side by side between writes: tkv_attend, tkv_read
 *          and everything that takes a const tkv_cache. Different caches are independent.
 * SIMD     x86: AVX2+FMA+F16C, or AVX-512 F/BW/VL/DQ/VNNI, found by cpuid at tkv_create; cfg.host.isa forces one.
 *          AArch64: NEON, with dot products where the compiler may use them (-march=armv8.2-a+dotprod and later).
 *          WebAssembly: with -msimd128. Elsewhere: scalar C.
 */
