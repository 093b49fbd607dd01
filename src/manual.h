/* tieredkv.h - the key/value cache of a transformer in three tiers: recent tokens exact, older ones compressed,
 * attention computed directly on the compressed bytes. One header, libc and libm only. MIT licence, see LICENSE.
 *
 * Generated from src/ by tools/amalgamate.py: edit there.
 *
 *   Do this in ONE C or C++ file:      #define TIEREDKV_IMPLEMENTATION
 *                                      #include "tieredkv.h"
 *   and in the others just:            #include "tieredkv.h"
 *   Build:                             cc -O2 program.c tieredkv.c -lm
 *                                      (tieredkv.c: the two lines above. No -m flags: kernels are chosen at run time)
 *
 * WHAT IT IS
 *   A place for K and V of every layer, and the attention over them. Tokens arrive exact; when 64 of them are
 *   old enough they are coded together, in 4 bits at first, in 3 or 2 later. Queries read all tiers through one
 *   softmax, multiplying the packed codes; nothing is ever decoded into memory.
 * WHAT IT IS NOT
 *   No model, tokenizer, sampling or RoPE (keys arrive rotated; KVQUANT formats undo it). No threads of its own,
 *   no files, no network.
 *
 * EXAMPLE
 *   tkv_config cfg = {0};                                      // zero means default, everywhere
 *   cfg.n_layers = 32; cfg.n_heads = 32; cfg.n_kv_heads = 8; cfg.head_dim = 128;
 *   tkv_cache *kv;
 *   char reason[200];                                          // which field is wrong, and what would be right
 *   if (tkv_create_ex(&cfg, &kv, reason, sizeof reason) != TKV_OK) return puts(reason);
 *   for each step, for each layer:
 *       tkv_append(kv, 0, layer, k, v, n);                     // [n][8][128] each, n new tokens of sequence 0
 *       tkv_attend(kv, 0, layer, q, n, out);                   // [n][32][128], causal over everything so far
 *   tkv_destroy(kv);
 *
 * OPTIONS (define before the include; none changes a declaration or a struct)
 *   macro                    where              effect
 *   TIEREDKV_IMPLEMENTATION  one file           emits the function bodies
 *   TKV_STATIC               any, implies it    everything static: a private copy in this file
 *   TKV_PREFIX name_         every include      public functions get this prefix: two copies in one program
 *   TKV_API decl             every include      what stands before public functions (dllexport, visibility)
 *   TKV_NO_MALLOC            implementation     no malloc and free: cfg.allocator or tkv_init_in_place only
 *   TKV_NO_SIMD              implementation     the scalar kernels only
 *   TKV_NO_AVX512            implementation     leaves those kernels out
 *   TKV_NO_REPORTS           implementation     no texts: configs as text, state as JSON, Prometheus
 *
 * CONCEPTS
 *   cache      all state for one model: n_layers layers, up to max_seqs sequences
 *   sequence   one conversation or beam; its tokens have positions 0, 1, 2, ... Each sequence has blocks of its own: no
 *              call shares blocks yet
 *   head group the n_heads / n_kv_heads query heads that share a KV head
 *   block      64 consecutive tokens of one layer of one sequence, all KV heads: what is coded, moved, counted
 *   record     the bytes of a block for one KV head: K codes, K metadata, V codes, V metadata
 *   format     how a block stores K or V (tkv_format); K and V are chosen separately
 *   tier       HOT: exact - the sinks (first sink_tokens) and the tail (at least hot_tokens newest)
 *              WARM: the warm_tokens before the tail, 4 bits;  ARCHIVE: everything older, 3 or 2
 *   plan       formats and lengths of the tiers, per layer if wanted
 *
 *   position   0 ...... 3 | 4 ................................... | ................. | ............ now
 *   tier       sinks: HOT | ARCHIVE                               | WARM              | tail: HOT
 *
 *   An append first moves what is due (a block whose newest token is hot_tokens old goes to warm, hot_tokens +
 *   warm_tokens old to the archive), then stores: a chunk is exact while its own queries run.
 *
 * BYTES (drawn in full at the parts that define them: core/tile.h, formats/exact.h, formats/kivi.h)
 *   exact      [token][channel] little-endian, channels padded to 16
 *   coded      tiles of 256 codes, 1 to 6 or 8 bits each; KIVI: fp16 scale and zero per group of 64 or 32;
 *              A and R: scales of one byte, channels in an order that the cache learned (formats/a.h, formats/r.h)
 *              INT, FP, SUBSPACE: [token][channel] codes, then scales (formats/token.h, formats/subspace.h)
 *              KVQUANT: [token][channel] codes, then slots for outliers (formats/kvquant.h)
 *   tkv_encode gives these bytes for one head's block; they are the same on every machine and instruction set
 *   (default floating-point flags), and decode to the same floats under any flags.
 *
 * NUMERICS
 *   decoded value     scale * code + zero with one rounding: bit-identical everywhere
 *   attention         against double precision on the decoded values: 1e-5 for F32, 2e-3 for F16 and BF16. In coded
 *                     tiers the ratio to the format's own error is at most a tenth in the root mean square over calls,
 *                     and at most a quarter in one call (cfg.precise: 2e-3 as well). This holds for values up to the
 *                     range of FP16 and logits with a standard deviation up to 4. One-hot softmaxes are outside:
 *                     a near tie may fall the other way. So are values that a grid holds exactly, such as +-6e4 alone:
 *                     the own error is 0 there, and arithmetic errs by 1e-2 of the output
 *   threads           bit-identical with any number of threads, and without
 *   not promised      the same bits of attention on different instruction sets
 *
 * MEMORY
 *   Everything comes from cfg.allocator in pages and a few growing tables, counted to the byte (tkv_memory).
 *   tkv_attend never allocates. An append fetches all it needs before it changes anything; when that fails it
 *   has not happened. tkv_init_in_place does the same inside a piece of yours and never allocates.
 *   What a budget has no room for can go outside RAM, to a file say, and stays part of attention (cfg.spill), or
 *   is dropped where it waits, and computed again by your model when its turn comes (cfg.remat).
 *
 * ERRORS   Every function that can fail returns a tkv_status and then has changed nothing; tkv_last_error
 *          gives the sentence for the last mutating call. Where there is no cache yet, tkv_create_ex and
 *          tkv_create_from_text (configs as text) write the sentence to a buffer of yours.
 * THREADS  One writer per cache. Readers (tkv_attend, tkv_read and everything that takes a const tkv_cache) may
 *          run side by side between writes. Different caches are independent.
 * SIMD     x86: AVX2+FMA+F16C, or AVX-512 F/BW/VL/DQ/VNNI, found by cpuid at tkv_create; cfg.isa forces one.
 *          AArch64: NEON, with dot products where the compiler may use them (-march=armv8.2-a+dotprod and later).
 *          WebAssembly: with -msimd128. Elsewhere: scalar C.
 */
