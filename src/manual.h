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
 * CONTENTS                                       RECIPES
 *    1 What it is and is not
 *    2 Compile it once                           R1 compile once: two files
 *    3 First program
 *    4 Words
 *    5 Appending and attending                   R8 attention over two sets of keys
 *                                                R11 characters with a common prompt
 *                                                R22 a reply that is taken back
 *                                                R13 back to a state of a hybrid model
 *                                                R16 a conversation in a file's bytes
 *                                                R17 a journal, and its file attached
 *                                                R18 a whole cache, read through a callback
 *                                                R19 a prompt that caches share through a store
 *    6 Configuration                             R9 a config as text, and back
 *    7 Memory and budgets                        R5 a budget
 *                                                R2 a chat without end in a fixed arena
 *                                                R7 small contexts
 *    8 Steps and an even frame time              R4 an even frame time
 *    9 Long texts                                R10 keys and values from token numbers
 *                                                R15 sinks inside a text
 *   10 Quality                                   R3 loading a calibration
 *   11 Bytes
 *   12 Numerics
 *   13 Errors, threads, SIMD                     R14 an append as parts
 *                                                R6 threads of a pool
 *   14 Reports
 *   15 The CUDA companion
 *   16 In a runtime                              R20 decoders that read an encoder
 *   17 In your build                             R21 a cache that C++ destroys
 *
 * The declarations below this manual define each function: shapes, errors, cost and source. The manual names the
 * functions for each purpose, and what to expect of them. `cfg.x` is a field of tkv_config.
 *
 *
 * 1. WHAT IT IS AND IS NOT
 *
 *   The library stores K and V of every layer and computes the attention over them. Tokens are stored exactly at
 *   first. When 64 of them are old enough, they are coded together: in 4 bits at first, in 3 or 2 bits later. Queries
 *   read all tiers through one softmax. In A, R, KIVI, SQUAT and Q8 formats they multiply the packed codes. The other
 *   coded formats are decoded a little at a time, on the stack. The cache never stores decoded values.
 *
 *   It contains no model, no tokenizer and no sampling. It does not apply RoPE: keys must arrive rotated. (KVQUANT
 *   formats undo the rotation inside.) It starts no threads, opens no files and uses no network.
 *
 *   A head has at most 576 channels. The cache stores them padded to a multiple of 16. Heads of more than 256 channels
 *   have no SQUAT formats, and no blocks outside RAM.
 *
 *
 * 2. COMPILE IT ONCE
 *
 *   The header has declarations and, behind TIEREDKV_IMPLEMENTATION, the function bodies. One file of the program
 *   defines that macro. The bodies are long, so give them a file of their own. It is then compiled once, and not
 *   again while you work. The file may be C99 or C++11, and later versions of both.
 *
 * Recipe R1: compile once: two files
 *     // file: tieredkv.c
 *     #define TIEREDKV_IMPLEMENTATION
 *     #include "tieredkv.h"
 *     // file: program.c
 *     #include "tieredkv.h"
 *     #include <stdio.h>
 *
 *     int main(void) {
 *         tkv_build_info build;
 *         if (tkv_get_build(NULL, &build) != TKV_OK) return 1;
 *         if (build.version != TKV_VERSION || build.config_bytes != sizeof(tkv_config)) {
 *             puts("tieredkv.c and program.c were compiled with different headers");
 *             return 1;
 *         }
 *         printf("version %s, %zu bytes of config\n", TKV_VERSION_STRING, build.config_bytes);
 *         return 0;
 *     }
 * End of recipe
 *
 *   Options are macros. Define them before the include. None changes a declaration or a struct.
 *
 *   macro                    where              effect
 *   TIEREDKV_IMPLEMENTATION  one file           emits the function bodies
 *   TKV_STATIC               any, implies it    makes everything static: a private copy in this file
 *   TKV_PREFIX name_         every include      prefixes public functions and types: two copies in one program
 *   TKV_API decl             every include      stands before public functions (dllexport, visibility)
 *   TKV_ASSERT(condition)    implementation     turns on the library's own assertions, e.g. to assert(condition)
 *   TKV_NO_MALLOC            implementation     no malloc and free: cfg.host.allocator or tkv_create_in_place only
 *   TKV_NO_SIMD              implementation     leaves out all kernels but the scalar ones
 *   TKV_NO_AVX512            implementation     leaves out the AVX-512 kernels
 *   TKV_NO_REPORTS           implementation     leaves out configs as text, reports as JSON and Prometheus, and the
 *                                               names of levels
 *   TKV_NO_KVQUANT           implementation     leaves out the KVQUANT formats and the learning of their tables
 *   TKV_NO_SQUAT             implementation     leaves out the SQUAT formats
 *   TKV_NO_TOKEN_FORMATS     implementation     leaves out INT8, INT4, FP8 and FP4
 *   TKV_NO_SUBSPACE          implementation     leaves out the SUBSPACE formats
 *   TKV_NO_EVICT             implementation     leaves out eviction, importance, anchors, pins, named sinks
 *   TKV_NO_OFFLOAD           implementation     leaves out the store outside RAM, and promotion from it
 *   TKV_NO_DISCARD           implementation     leaves out discarding and recomputation
 *   TKV_NO_METER             implementation     leaves out quality meter, feedback, threshold store, levels by length,
 *                                               jumps of levels (pressure.jump)
 *   TKV_NO_MOVES             implementation     leaves out removing, shifting, copying, keeping and sliding of tokens
 *   TKV_NO_STATES            implementation     leaves out the states of recurrent layers
 *   TKV_NO_APPEND_PARTS      implementation     leaves out appends in parts (tkv_append_part)
 *   TKV_NO_SAVE              implementation     leaves out saving and loading of sequences
 *   TKV_CORE                 implementation     sets the twelve from TKV_NO_KVQUANT to TKV_NO_SAVE
 *
 *   Switches shorten compiling and the object. README.md has a table of the bytes that each saves.
 *
 *   Exact formats, Q8, KIVI, A and R, sequences, budgets, calibration and attention are in every build. A config or
 *   a call that needs a missing part gets TKV_ERR_UNSUPPORTED. Its sentence names the switch, for example:
 *   "tiers.archive.k is 31; TKV_NO_KVQUANT leaves this format out". Names of formats and policies stay known.
 *
 *   A build with TKV_NO_REPORTS has no tkv_parse_config, tkv_print_config, tkv_print_report, tkv_get_level and
 *   tkv_find_level. tkv_create_ex then answers a text with TKV_ERR_UNSUPPORTED.
 *
 *
 * 3. FIRST PROGRAM
 *
 *   tkv_config cfg = {0};                                      // zero means default, everywhere
 *   cfg.model.n_layers = 32; cfg.model.n_heads = 32; cfg.model.n_kv_heads = 8; cfg.model.head_dim = 128;
 *   tkv_cache *kv;
 *   char reason[512];                                          // which field is wrong, and what would be right
 *   if (tkv_create_ex(&cfg, NULL, 0, &kv, reason, sizeof reason) != TKV_OK) return puts(reason), 1;
 *   for each step, for each layer:
 *       tkv_append(kv, 0, layer, k, v, n);                     // [n][8][128] each, n new tokens of sequence 0
 *       tkv_attend(kv, 0, layer, q, n, out);                   // [n][32][128], causal over everything so far
 *   tkv_destroy(kv);
 *
 *   examples/quickstart.c is this program with every status checked. examples/generate.c runs a real model.
 *
 *   The recipes of this manual are compiled and run by tests/test_manual.py. Except for R1, each stands inside main.
 *   Lines above `// main:` stand before it. A recipe may use these names:
 *     cfg                      defaults, and a model of 2 layers, 4 query heads and 2 KV heads of 32 channels.
 *                              An append has at most 64 tokens.
 *     LAYERS, HEADS, DIM       2, 4 and 32
 *     run_model(n)             stands for your model: fills k, v and q with n tokens of one layer
 *     k, v, q, out             arrays for 64 tokens
 *     kv, st, reason           a cache pointer, a status, and a text of 200 bytes
 *   The end of main destroys kv. The headers of libc and POSIX that the recipes need are included.
 *
 *
 * 4. WORDS
 *
 *   cache      all state for one model: n_layers layers, up to max_seqs sequences
 *   sequence   one conversation or beam: tokens in the order of their appends
 *   index      of a token: 0 .. length - 1, no holes. It never changes while tokens only come and go at the end
 *   position   of a token: what RoPE rotated its key for. Positions may repeat, jump and be moved. Without that, index
 *              and position are the same number
 *   fork       a sequence that shares the blocks of another one and goes on for itself (tkv_seq_fork)
 *   head group the n_heads / n_kv_heads query heads that share a KV head
 *   block      64 consecutive tokens of one layer of one sequence, all KV heads: the unit of coding and of memory
 *   record     the bytes of a block for one KV head: K codes, K metadata, V codes, V metadata
 *   format     how a block stores K or V (tkv_format); K and V are chosen separately
 *   tier       HOT: exact - the sinks (first sink_tokens) and the tail (at least hot_tokens newest)
 *              WARM: the warm_tokens before the tail, 4 bits;  ARCHIVE: everything older, 3 or 2 bits
 *   anchors    important tokens that stay exact beside the sinks, at most 1024 a layer (cfg.tiers.n_anchors)
 *   sinks      the first sink_tokens tokens. Named sinks: tokens at any index (tkv_seq_set_sinks)
 *   plan       formats and lengths of the tiers, per layer if wanted
 *   ladder     plans from loose to tight, called levels; a cache under a budget goes along them
 *   pressure   bytes used / bytes allowed, as a moving average
 *   table      what a layer of an A, R or KVQUANT format has learned; a calibration is the tables of a cache
 *
 *   state      what a layer without keys knows after n tokens: opaque bytes of the caller's (tkv_seq_put_state)
 *
 *   position   0 ...... 3 | 4 ................................... | ................. | ............ now
 *   tier       sinks: HOT | ARCHIVE                               | WARM              | tail: HOT
 *
 *   An append first moves the blocks that are due, then stores the new tokens. A block is due for WARM when its
 *   newest token is hot_tokens old, and for ARCHIVE at hot_tokens + warm_tokens. Some layers keep blocks up to 63
 *   tokens longer (chapter 8). A chunk is exact while its own queries run. With a budget, blocks move when bytes are
 *   needed instead (tkv_get_budget).
 *
 *   Four words name tokens that are not in RAM:
 *   offloaded  a block that lies in the caller's store, a file say; attention fetches it from there (cfg.offload)
 *   discarded  a block whose bytes were given up; the caller's model must recompute it before attention needs it
 *              (cfg.budget.discard), or gives its rows when attention reads them (cfg.recompute)
 *   evicted    a token that a policy or the caller removed for good (cfg.evict, tkv_evict)
 *   expired    a token that every sliding window has passed, and that was then removed
 *
 *   All four keep their indices and positions. The length of a sequence (tkv_get_length) counts them.
 *
 *   Functions mean by a number of a token:
 *     index      tkv_read, tkv_seq_truncate, tkv_seq_fork, tkv_seq_keep, masks, row_ends, first_queries, scores, pins,
 *                named sinks, eviction, tiers
 *     position   tkv_seq_remove, tkv_seq_shift, tkv_seq_copy, windows, ALiBi, RoPE
 *   Causality goes by index inside the blocks that have queries of the call, else by position.
 *
 *
 * 5. APPENDING AND ATTENDING
 *
 *   Chunks. tkv_append takes at most cfg.limits.max_append tokens of one layer, oldest first. Layers are independent:
 *   append to each when its K and V are ready. A chunk stays exact until the next append to its layer.
 *
 *   Causality. Append first, attend then. tkv_attend takes the queries of the last n tokens. Query i of them sees all
 *   older tokens, and those of the chunk up to its own. n may be less than the chunk. For queries of other tokens,
 *   first_queries of tkv_attend_params gives the index of the first one.
 *
 *   Shapes. tkv_append and tkv_attend take packed floats. tkv_append_ex and tkv_attend_ex take strides, and F32, F16
 *   or BF16. Query head h reads KV head h / (n_heads / n_kv_heads). Any whole ratio works.
 *
 *   Ragged batches. `batch` lists sequences with a number of tokens each. The rows of all entries follow one another.
 *   tkv_append_ex stores all entries or none.
 *
 *   tkv_attend_params holds everything else that changes a logit:
 *     scale, softcap, alibi_slopes    factors and offsets of the logits
 *     sink_logits                     learned logits that join the softmax without a value
 *     window                          newest keys that a query sees
 *     mask                            floats that are added to the logits
 *     mask_bits, n_mask_bits          bits over the newest tokens, for trees of draft tokens
 *     non_causal                      every query sees every key
 *
 *   Windows. cfg.model.window sets a sliding window for all layers, cfg.layers one for each layer. A window hides the
 *   sinks, too, unless window_sinks is 1. When every window has passed a token, the cache removes it: it has expired.
 *   An old query or a wider window that would need it gets TKV_ERR_RANGE. A window in tkv_attend_params hides keys but
 *   removes none.
 *
 *   Layers. A layer can read K and V of an earlier layer (share_kv), or have none (no_cache).
 *
 *   Outputs. `lse` is the log-sum-exp of the logits. `scores` is the attention that each key received, at the cost of
 *   a second pass over the keys. tkv_read decodes K and V of any tier.
 *
 *   Forks. tkv_seq_fork makes a sequence that begins with the tokens of another one: a character after a common
 *   prompt, a beam, a reply to try out. Both share the blocks, so it copies nothing and codes nothing. Each then
 *   appends, truncates, pins and evicts for itself. tkv_seq_truncate takes back the newest tokens of one sequence.
 *
 *   Replies that are taken back. A chat writes a reply, the user wants another one, and the tokens of the reply go. If
 *   they are truncated, the prompt stays as coarse as the reply has made it: after a long one, even the user's last
 *   question has left the hot tail. A fork at the end of the prompt loses nothing (recipe R22). It keeps the hot tail
 *   exact while the reply grows, and takes its bytes until it is reset at the next message. Keep the logits of the
 *   prompt's last token with it: the next reply begins with them, and no token is computed again.
 *
 *   Other changes of a sequence. None of them codes a token again:
 *     tkv_seq_remove   removes positions anywhere
 *     tkv_seq_shift    gives tokens other positions
 *     tkv_seq_copy     adds tokens of another sequence, at other positions: a document that several prompts share, or a
 *                      token that belongs to several sequences (append it to one, and copy it to the others)
 *     tkv_seq_keep     after a draft tree: the accepted path stays, the other newest tokens go
 *     tkv_seq_slide    a text without end (chapter 7)
 *
 *   Positions and masks of a call. token_positions of tkv_append_params gives each new token a position, as images and
 *   draft trees need it. row_ends of tkv_attend_params lets the tokens of an image see all of it in a causal chunk.
 *   first_rows of both names the row at which each sequence of a batch begins, for batches padded on the left.
 *   query_positions gives queries a position of their own: one context can lie in several sequences, caches or
 *   processes, and tkv_merge_attention joins what each of them gives.
 *
 *   States. A recurrent layer has no keys that could be cut: it must begin again from a state. tkv_seq_put_state keeps
 *   a copy of such bytes after the first n tokens, for a layer and a sequence. It may be a no_cache layer. States count
 *   in the budget and in tkv_get_memory. They are forked with their sequence and share their bytes. tkv_seq_truncate
 *   and tkv_seq_remove take those that have seen a token that goes. To go back to n tokens:
 *
 *     1. tkv_seq_find_state   the newest position at or before n at which all stateful layers have a state; maybe 0
 *     2. tkv_seq_truncate     cuts to that position, or tkv_seq_fork makes another sequence that ends there
 *     3. tkv_seq_get_state    gives each layer its state; at 0 a model begins anew
 *     4. the model computes the tokens between that position and n again, and appends them
 *
 *   A sequence keeps states at 64 positions (cfg.limits.max_states), all layers at the same ones. Their distances from
 *   the newest one grow like powers. Measured with a state at each 64th of 64,000 tokens (tests/test_states.c): going
 *   back by d tokens computed at most 0.2 d + 64 tokens again. With 16 positions it was 1.1 d + 64.
 *
 *   Under a budget, states are thinned out first, to an eighth of max_states. Then tokens are coded in fewer bits, down
 *   the ladder. Then all other states go except the newest, and only then tokens are evicted. The newest state of each
 *   layer and the newest position that all layers have stay. Other states do not count as pressure. A put evicts no
 *   token. If a full budget has no room for a state, it replaces the layer's older one.
 *
 *   In place, states have memory of their own: cfg.limits.state_bytes, in all sequences together. It is a part of what
 *   tkv_get_required_bytes returns. A state takes 64 bytes more than its size, which is rounded up to 64.
 *
 *   Moves. tkv_seq_shift gives tokens other positions, and no key changes: attention turns the query by the distance.
 *   It needs the RoPE of each layer: model.rope, or layers[i].rope where layers differ; rope.dim TKV_OFF where a layer
 *   does not rotate. Give the frequencies of YaRN, Llama 3 and the like in rope.frequencies. M-RoPE, frequencies that
 *   change with the length and learned positions (rope.kind) cannot move. The cache keeps cosines and sines of each
 *   distance, about 0.5 KB for 128 channels, in its index; in place for 32 distances at most. Without memory for one
 *   it is computed in each call, with the same bits. tkv_rotate_rope does the same to a vector of yours. A decode step
 *   over 32,768 tokens with 100 distances takes 3 % longer, with one for each block 10 % (bench/moves.c).
 *
 *   Parts. Attention over two sets of keys is joined by their log-sum-exps. The sets can be two sequences, two caches
 *   or two machines. Give the keys of each set the rotation of their place in the whole text.
 *
 * Recipe R8: attention over two sets of keys
 *     float part[3][4 * 32], lse[3][4], worst = 0.0f;
 *     cfg.limits.max_seqs = 3;
 *     if (tkv_create(&cfg, &kv)) return 1;
 *     for (int seq = 0; seq < 2; seq++) {                  // 0: a document; 1: a question; 2: both
 *         run_model(64);
 *         if (tkv_append(kv, seq, 0, k, v, 64) || tkv_append(kv, 2, 0, k, v, 64)) return 1;
 *     }
 *     for (int seq = 0; seq < 3; seq++) {                  // one query, at the end of each
 *         tkv_attend_params p = {0};
 *         p.seq = seq;
 *         p.n = 1;
 *         p.q = q;
 *         p.out = part[seq];
 *         p.lse = lse[seq];
 *         if (tkv_attend_ex(kv, &p)) return 1;
 *     }
 *     tkv_merge_attention(part[0], lse[0], part[1], lse[1], HEADS, DIM);
 *     for (int i = 0; i < HEADS * DIM; i++) {
 *         float error = part[0][i] - part[2][i];
 *         if (error > worst || -error > worst) worst = error < 0.0f ? -error : error;
 *     }
 *     printf("merged and whole differ by %s 1e-5\n", worst < 1e-5f ? "less than" : "more than");
 * End of recipe
 *
 * Recipe R11: characters with a common prompt
 *     enum { CHARACTERS = 8 };
 *     tkv_memory_info memory;
 *     size_t prompt;
 *     cfg.limits.max_seqs = CHARACTERS;
 *     if (tkv_create(&cfg, &kv)) return 1;
 *     for (int i = 0; i < 16; i++) {                       // the prompt is read once: 1,024 tokens
 *         run_model(64);
 *         for (int layer = 0; layer < LAYERS; layer++)
 *             if (tkv_append(kv, 0, layer, k, v, 64)) return 1;
 *     }
 *     if (tkv_get_memory(kv, &memory)) return 1;
 *     prompt = memory.total;
 *     for (int seq = 1; seq < CHARACTERS; seq++)
 *         if (tkv_seq_fork(kv, 0, seq, TKV_UNLIMITED)) return 1;
 *     for (int seq = 0; seq < CHARACTERS; seq++) {         // each says something of its own
 *         run_model(40);
 *         for (int layer = 0; layer < LAYERS; layer++)
 *             if (tkv_append(kv, seq, layer, k, v, 40)) return 1;
 *     }
 *     if (tkv_get_memory(kv, &memory)) return 1;
 *     printf("%d characters take %.1f times the bytes of their prompt\n", CHARACTERS,
 *            (double)memory.total / (double)prompt);
 *     if (tkv_seq_truncate(kv, 3, 1024 + 15)) return 1;    // the player interrupts character 3
 *     printf("character 3 has %d tokens, character 4 %d\n", tkv_get_length(kv, 3, 0), tkv_get_length(kv, 4, 0));
 * End of recipe
 *
 * Recipe R22: a reply that is taken back
 *     enum { CHAT, PROMPT };                               // PROMPT: the chat as it was before the reply
 *     int hot[3];
 *     cfg.limits.max_seqs = 2;
 *     if (tkv_create(&cfg, &kv)) return 1;
 *     for (int part = 0; part < 4; part++) {               // 0: the prompt of 1,000 tokens; then three replies of 640
 *         tkv_layer_info info;
 *         for (int i = 0; i < (part ? 16 : 25); i++) {
 *             run_model(40);
 *             for (int layer = 0; layer < LAYERS; layer++)
 *                 if (tkv_append(kv, CHAT, layer, k, v, 40)) return 1;
 *         }
 *         if (part == 0 && tkv_seq_fork(kv, CHAT, PROMPT, TKV_UNLIMITED)) return 1;
 *         if ((part == 1 || part == 2) && tkv_seq_fork(kv, PROMPT, CHAT, TKV_UNLIMITED)) return 1; // takes it back
 *         if (part == 3 && tkv_seq_truncate(kv, CHAT, 1000)) return 1; // so does this, in fewer bits
 *         if (tkv_get_layer(kv, CHAT, 0, &info)) return 1;
 *         if (part != 1) hot[part ? part - 1 : 0] = info.tokens[TKV_TIER_HOT];
 *     }
 *     printf("exact tokens: %d before the replies, %d after two forks, %d after a cut\n", hot[0], hot[1], hot[2]);
 *     if (tkv_seq_reset(kv, PROMPT)) return 1;             // at the user's next message; then fork behind it
 * End of recipe
 *
 * Recipe R13: back to a state of a hybrid model
 *     static tkv_layer_config layers[LAYERS];
 *     static float state[1000];                            // what layer 0 knows
 *     size_t bytes;
 *     layers[0].no_cache = 1;                              // it is recurrent, layer 1 has keys
 *     cfg.layers = layers;
 *     if (tkv_create(&cfg, &kv)) return 1;
 *     for (int n = 64; n <= 6400; n += 64) {
 *         run_model(64);
 *         for (int i = 0; i < 64 * DIM; i++) state[i % 1000] = 0.9f * state[i % 1000] + k[i];
 *         if (tkv_append(kv, 0, 1, k, v, 64)) return 1;
 *         if (tkv_seq_put_state(kv, 0, 0, n, state, sizeof state)) return puts(tkv_get_last_error(kv)), 1;
 *     }
 *     int wanted = 6000, kept = tkv_seq_find_state(kv, 0, wanted);
 *     if (tkv_seq_truncate(kv, 0, kept)) return 1;
 *     if (kept && tkv_seq_get_state(kv, 0, 0, kept, state, sizeof state, &bytes)) return 1;
 *     printf("back to %d: from the state of %d tokens, %d bytes\n", wanted, kept, (int)bytes);
 * End of recipe
 *
 *   Saving. tkv_seq_save writes a sequence to memory, tkv_seq_save_to through a callback. tkv_seq_load verifies all of
 *   it before it changes anything, and reads it into an empty sequence of this or another cache. Attention then gives
 *   the same bits. A damaged or cut file gives TKV_ERR_DATA and a sentence; the cache is as it was. A file of another
 *   model gives TKV_ERR_CONFIG. Give `model` bytes that change when weights change, such as a hash of the file. Tables
 *   that the cache has already are not stored twice. A layer has at most four: beyond that, blocks are coded again with
 *   its current table, and tkv_load_info says how many. The checksums (XXH64) find accidents; they do not stop an
 *   attacker. Write to a new file, flush it, and rename it: then a crash leaves the old file or the new one.
 *   examples/save_file.h does it. `length` saves the first tokens only. In place give `scratch`.
 *
 * Recipe R16: a conversation in a file's bytes
 *     static unsigned char bytes[4 << 20];
 *     tkv_save_params save = {0};
 *     tkv_load_params load = {0};
 *     size_t n;
 *     cfg.limits.max_seqs = 2;
 *     if (tkv_create(&cfg, &kv)) return 1;
 *     for (int i = 0; i < 32; i++) {
 *         run_model(64);
 *         for (int layer = 0; layer < LAYERS; layer++)
 *             if (tkv_append(kv, 0, layer, k, v, 64)) return 1;
 *     }
 *     save.model = load.model = "my model, version 3";
 *     save.model_bytes = load.model_bytes = 19;
 *     if (tkv_seq_save(kv, &save, bytes, sizeof bytes, &n)) return puts(tkv_get_last_error(kv)), 1;
 *     load.seq = 1;
 *     bytes[n / 2] ^= 1;                                   // a flipped bit is found
 *     printf("damaged: %s\n", tkv_get_status_text(tkv_seq_load(kv, &load, bytes, n, NULL)));
 *     bytes[n / 2] ^= 1;
 *     if (tkv_seq_load(kv, &load, bytes, n, NULL)) return puts(tkv_get_last_error(kv)), 1;
 *     printf("%d tokens in %d bytes\n", tkv_get_length(kv, 1, 0), (int)n);
 * End of recipe
 *
 *   A journal is a file that grows with its conversation. Give its bytes as `former`: only what changed since its last
 *   save is written, to come behind it. info.at says where. 0 means that the bytes are a new file: there was none, or
 *   more than half of it is out of use. A crash in between leaves the last whole save, which a load with `recover`
 *   finds. Then give only the bytes up to tkv_load_info.end as `former` of the next save.
 *
 *   Attached files. A load with `attach` leaves archived blocks where they are, in a mapped file say, and reads them
 *   there. It copies only the index and the blocks that are still to be compressed. A block is verified when it is read
 *   first, so attention may return TKV_ERR_DATA. Blocks in the file take no bytes of the budget. tkv_promote brings
 *   them into RAM. The bytes must stay until `release`. They are never written to.
 *
 * Recipe R17: a journal, and its file attached
 *     static unsigned char bytes[4 << 20];
 *     unsigned char *journal = bytes + (64 - (size_t)bytes % 64) % 64; // attached bytes begin at a multiple of 64
 *     tkv_save_params save = {0};
 *     tkv_save_info info;
 *     tkv_load_params load = {0};
 *     tkv_load_info loaded;
 *     size_t n = 0, room = sizeof bytes - 64;
 *     cfg.limits.max_seqs = 2;
 *     if (tkv_create(&cfg, &kv)) return 1;
 *     save.info = &info;
 *     for (int i = 0; i < 16; i++) {
 *         run_model(64);
 *         for (int layer = 0; layer < LAYERS; layer++)
 *             if (tkv_append(kv, 0, layer, k, v, 64)) return 1;
 *         save.former = n ? journal : NULL;
 *         save.former_bytes = n;
 *         if (tkv_seq_save(kv, &save, NULL, 0, &n)) return 1;           // how much, and where
 *         if (info.at == 0) save.former_bytes = 0;                      // anew
 *         if (info.bytes > room - info.at) return 1;
 *         if (tkv_seq_save(kv, &save, journal + info.at, room - info.at, &n)) return 1;
 *         n = info.at + info.bytes;
 *     }
 *     load.seq = 1;
 *     load.attach = 1;
 *     if (tkv_seq_load(kv, &load, journal, n, &loaded)) return puts(tkv_get_last_error(kv)), 1;
 *     printf("the last of 16 saves wrote %d blocks of %d; %d stay in the file\n", info.n_new_blocks, info.n_blocks,
 *            loaded.n_attached);
 * End of recipe
 *
 *   A whole cache. With TKV_ALL_SEQS as the sequence, a save has all sequences and all that decides later bytes. Load
 *   it into a new cache of the same config. It goes on as the saved one would have, with the same bits. Exceptions are
 *   stores, attached files and recomputation (tkv_seq_save). Blocks that sequences share are saved once. So an arena
 *   moves to another address, and a server or a game keeps its state.
 *
 *   A callback as the file. tkv_seq_load_from asks for pieces of the file, each block by itself. Use it where the bytes
 *   are in an archive, or where memory has no room for the file beside the cache.
 *
 * Recipe R18: a whole cache, read through a callback
 *     static unsigned char bytes[8 << 20];
 *     static int read_bytes(void *user, size_t at, void *to, size_t n) {
 *         return memcpy(to, (unsigned char *)user + at, n) == NULL;     // from a file: seek and read; 0: all n bytes
 *     }
 *     // main:
 *     tkv_save_params save = {0};
 *     tkv_load_params load = {0};
 *     tkv_cache *later;
 *     size_t n;
 *     int same = 1;
 *     cfg.limits.max_seqs = 3;
 *     if (tkv_create(&cfg, &kv) || tkv_create(&cfg, &later)) return 1;
 *     for (int i = 0; i < 20; i++) {
 *         run_model(64);
 *         for (int layer = 0; layer < LAYERS; layer++)
 *             if (tkv_append(kv, 0, layer, k, v, 64)) return 1;
 *     }
 *     if (tkv_seq_fork(kv, 0, 1, 1000) || tkv_seq_fork(kv, 0, 2, 500)) return 1;
 *     save.seq = load.seq = TKV_ALL_SEQS;
 *     if (tkv_seq_save(kv, &save, bytes, sizeof bytes, &n)) return puts(tkv_get_last_error(kv)), 1;
 *     if (tkv_seq_load_from(later, &load, n, read_bytes, bytes, NULL)) return puts(tkv_get_last_error(later)), 1;
 *     for (int i = 0; i < 30; i++) {                                    // the same tokens come to both
 *         run_model(64);
 *         for (int layer = 0; layer < LAYERS; layer++) {
 *             float there[HEADS * DIM];
 *             if (tkv_append(kv, i % 3, layer, k, v, 64) || tkv_append(later, i % 3, layer, k, v, 64)) return 1;
 *             if (tkv_attend(kv, i % 3, layer, q, 1, out) || tkv_attend(later, i % 3, layer, q, 1, there)) return 1;
 *             same &= memcmp(out, there, sizeof there) == 0;
 *         }
 *     }
 *     printf("3 sequences in %d bytes; later answers have %s\n", (int)n, same ? "the same bits" : "other bits");
 *     tkv_destroy(later);
 * End of recipe
 *
 *   Prefixes. tkv_seq_publish_prefix puts what was read of a prompt into a store of yours, tkv_seq_adopt_prefix takes
 *   it out again: in another sequence, process or machine. A value is a page of 256 tokens, found by a hash of all
 *   tokens up to its end. The hash also names model, plan, tables and tenant, so that no page is found that this cache
 *   would have coded in another way. Tables must not change any more: load the same calibration everywhere. The hot
 *   tail is not published. examples/store_lmdb.c and store_valkey.c are stores. Without a store (NULL) sequences of one
 *   cache find each other's pages, and share the blocks: a server publishes each prompt when it was read, and lets each
 *   new sequence adopt before it reads.
 *
 * Recipe R19: a prompt that caches share through a store
 *     static struct { tkv_prefix_hash hash; unsigned char bytes[1 << 20]; size_t n; } value[8];
 *     static int n_values;
 *     static int get(void *user, const tkv_prefix_hash *hashes, int n, const void **bytes, size_t *sizes) {
 *         int i, k;
 *         (void)user;
 *         for (i = 0; i < n; i++) {
 *             for (k = 0; k < n_values && memcmp(&value[k].hash, &hashes[i], sizeof *hashes) != 0; k++) continue;
 *             if (k == n_values) return i;                              // the first i pages are here
 *             bytes[i] = value[k].bytes, sizes[i] = value[k].n;
 *         }
 *         return n;
 *     }
 *     static int put(void *user, const tkv_prefix_hash *hash, const void *bytes, size_t size) {
 *         (void)user;
 *         if (n_values == 8 || size > sizeof value->bytes) return 1;    // not kept
 *         value[n_values].hash = *hash, value[n_values].n = size;
 *         memcpy(value[n_values++].bytes, bytes, size);
 *         return 0;
 *     }
 *     // main:
 *     static int tokens[1000];                                          // the prompt
 *     tkv_prefix_store store = {NULL, get, put, NULL};
 *     tkv_prefix_params p = {0};
 *     tkv_prefix_info info;
 *     tkv_cache *other;
 *     cfg.limits.max_seqs = 2;
 *     cfg.tiers.warm.k = cfg.tiers.warm.v = TKV_KIVI4;                  // formats without tables need no calibration
 *     cfg.tiers.archive.k = cfg.tiers.archive.v = TKV_KIVI2;
 *     if (tkv_create(&cfg, &kv) || tkv_create(&cfg, &other)) return 1;
 *     p.seq = 0, p.spare = 1, p.tokens = tokens, p.n_tokens = 1000, p.model = "toy", p.model_bytes = 3;
 *     for (int i = 0; i < 20; i++) {
 *         run_model(50);
 *         for (int layer = 0; layer < LAYERS; layer++)
 *             if (tkv_append(kv, 0, layer, k, v, 50)) return 1;
 *     }
 *     if (tkv_seq_publish_prefix(kv, &p, &store, &info)) return puts(tkv_get_last_error(kv)), 1;
 *     printf("%d pages in the store, %d bytes\n", info.n_put, (int)info.bytes);
 *     if (tkv_seq_adopt_prefix(other, &p, &store, &info)) return puts(tkv_get_last_error(other)), 1;
 *     printf("%d of %d tokens need not be read\n", info.n_tokens, p.n_tokens);
 *     tkv_destroy(other);
 * End of recipe
 *
 *
 * 6. CONFIGURATION
 *
 *   Zero means default in every field. Fill a config with zeros first: `tkv_config cfg = {0};`, or
 *   tkv_default_config. tkv_validate_config and tkv_create_ex name the field that is wrong and the values allowed.
 *   The groups:
 *     model        layers, heads, channels, window, scale, RoPE; n_layers, n_heads and head_dim are required
 *     limits       sequences, tokens per sequence, tokens per append
 *     tiers        lengths and formats of sinks, tail, warm tier and archive; anchors
 *     format       options of formats; each format ignores those of others
 *     layers       exceptions by layer: heads, channels, formats, lengths, window, RoPE, shared K and V
 *     budget       bytes, ladder, pressure controller, discarding
 *     evict        the policy that removes tokens, and when
 *     importance   how tokens are rated
 *     offload      the store of the program for old blocks
 *     recompute    the model that gives rows of discarded blocks
 *     meter        the quality meter
 *     host         allocator, threads, events, instruction set, NaNs
 *
 *   Lengths have sentinels. TKV_OFF means that this part is off. TKV_UNLIMITED means that this tier takes all tokens
 *   and that later tiers stay empty. `cfg.tiers.hot_tokens = TKV_UNLIMITED` makes an exact cache. TKV_ZERO is the
 *   number 0 in float fields whose 0 means default.
 *
 *   Presets. tkv_apply_preset sets lengths and formats of the tiers to a named plan. Bits per value of archived
 *   tokens, metadata included: "quality" 4.06, "balanced" 3.06 (the default), "compact" 2.31, "extreme" 1.81.
 *   Measured on SmolLM2-135M, two windows of 4,096 tokens of WikiText-2 (make quality, bench/QUALITY.md):
 *
 *   plan                          bits   KL divergence to exact   perplexity
 *   quality                       4.06   .0014                    0.0 %
 *   balanced                      3.06   .0025                    +0.2 %
 *   archive A30 + R20             2.56   .0046                    +0.4 %
 *   compact                       2.31   .0054                    +0.4 %
 *   extreme                       1.81   .0107                    +1.4 %
 *   archive and warm KIVI4        4.50   .0042                    +0.6 %
 *   warm KIVI4, archive KIVI2     2.50   .168                     +16.8 %
 *
 *   A plan can follow the length. Preset "growing" is "quality" while the longest sequence has less than 2,048
 *   tokens, then "balanced", and from 8,192 on "compact": tokens that age get the format of today's length. It needs
 *   no max_tokens. A ladder of your own does the same: set from_tokens of its levels (cfg.budget.ladder).
 *
 *   On nine texts (six languages, C, Python), balanced has .52 times the divergence of KIVI4 in the mean. No model
 *   above 135 million weights was tested, and none that was trained for more than 8,192 tokens. Longer texts, up to
 *   32,768 tokens, were read with RoPE stretched.
 *
 *   Formats, and when to use which:
 *     F16           hot tier, the default
 *     BF16          hot tier, where values exceed 65504
 *     F32           hot tier, for references
 *     A40 .. A15    keys. They lose least at each number of bits measured. They learn from the first 256 tokens of
 *                   a layer, unless a calibration is loaded. Bits are shared out to four channels at a time, so a
 *                   head of 50 channels takes the bytes of one of 52, and errs as little.
 *     R40 .. R10    values; the same
 *     Q8            K and V, nearly exact, about half of the bytes of F16
 *     KIVI4         K and V, 4.5 bits, without learning: for small contexts (R7)
 *     KIVI3, KIVI2  for comparison with KIVI; A and R lose less at fewer bits
 *     INT8, INT4    tokens coded one by one. INT4 loses much less with cfg.format.rotate and cfg.format.center_k.
 *     FP8, FP4      tokens coded one by one, as floats. Use FP4 with cfg.format.rotate.
 *     SQUAT         keys, with the bytes and the decoding of KIVI, for comparison with SQuat
 *     SUBSPACE, KVQUANT   for comparison with their papers. KVQUANT needs cfg.model.rope, or
 *                   TKV_KVQUANT_POST_ROPE.
 *   INT, FP, SUBSPACE and KVQUANT formats are decoded before each product, so attention takes longer.
 *
 *   Why A and R lose little: a query does not weigh the channels of a key alike. Channels that queries weigh and that
 *   vary get up to 6 bits, the others fewer or none. Values have no such channels. They are rotated until one small
 *   grid fits all channels. Heads that attend far back get more of their layer's bytes. One key of each 64 has a row of
 *   its own: the one that is farthest from the others. Such keys are often attention sinks in the middle of a text.
 *
 *   Layers. cfg.layers points to n_layers settings, and 0 takes the cache's value. The array is read during creation
 *   and not kept. A layer can have heads and channels of its own (n_heads, n_kv_heads, head_dim, v_head_dim), as where
 *   sliding and global layers alternate. K, V, queries and outputs of a call then have the shape of its layer, and
 *   tkv_get_layer reports it.
 *   Latents of MLA: with model.v_in_k 1, or layers[i].v_in_k, V is the first v_head_dim channels of K, and is not
 *   stored. DeepSeek has n_heads 128, n_kv_heads 1, head_dim 576, v_head_dim 512, rope.dim 64, rope.first 512, and a
 *   scale of its own. Appends take k alone. A40 and A30 give channels bits for both uses. Up to 128 query rows of a
 *   latent go through a block together: it is unpacked once for their scores and once for their values. They take
 *   0.65 MB of work space, or four times that with cfg.host.parallel_for.
 *
 *   Texts. A config can be a text. A key is the path of a field, such as tiers.hot_tokens or layers[0-5].window. The
 *   values `off` and `unlimited` are the sentinels of lengths. The formats f16, fp8-e4m3 and kivi4 are also read as
 *   fp16, fp8 and q4. An error names the line, the whole path of the key and the nearest correct one. A field that a
 *   text has twice is an error, in any two spellings. tkv_create_ex takes a text together with a config of callbacks.
 *   tkv_parse_config reads four forms, and tkv_print_config writes them:
 *
 *     TKV_TEXT_LINES          TKV_TEXT_JSON, whole paths as keys
 *     tiers.hot_tokens = 64   {"tiers.hot_tokens": 64,
 *     layers[3].window = 9     "layers[3].window": 9}
 *
 *     TKV_TEXT_TOML           TKV_TEXT_JSON_NESTED
 *     [tiers]                 {"tiers": {"hot_tokens": 64},
 *     hot_tokens = 64          "layers": {"3": {"window": 9}}}
 *     [layers.3]
 *     window = 9
 *
 *   Lines may have tables, so TOML is lines with tables and quotes. [layers.0-5] is a table for six layers. Each
 *   [[layers]] begins the next layer, and [[budget.ladder]] the next level. A table can also stand in braces, as in
 *   model.rope = { dim = 64 }. Numbers may have underscores, and lists comments. Escapes in strings are not read: no
 *   value needs one. In JSON, "layers" is an object of indices and ranges, or a list of objects. There, null leaves a
 *   layer as it is.
 *
 * Recipe R9: a config as text, and back
 *     const char text[] = "preset = compact            # what follows overrides it\n"
 *                         "model.n_layers = 32\n"
 *                         "model.n_heads = 32\n"
 *                         "model.n_kv_heads = 8\n"
 *                         "model.head_dim = 128\n"
 *                         "tiers.archive = a25/r20     # keys / values\n"
 *                         "layers[0-1].warm = q8       # exceptions, by layer\n"
 *                         "layers[31].n_kv_heads = 2   # one with fewer and wider heads\n"
 *                         "layers[31].head_dim = 256\n";
 *     static tkv_layer_config layers[32];              // memory for the exceptions
 *     const tkv_config_arrays arrays = {layers, 32, NULL, 0, NULL, 0};
 *     const char toml[] = "[tiers]\nhot_tokens = 128\n[layers.2-5]\nwindow = 1_024\n";
 *     char back[1000];
 *     cfg = tkv_default_config();
 *     if (tkv_parse_config(&cfg, &arrays, text, strlen(text), reason, sizeof reason)) return puts(reason), 1;
 *     if (tkv_validate_config(&cfg, reason, sizeof reason)) return puts(reason), 1;
 *     if (tkv_print_config(&cfg, TKV_TEXT_JSON, back, sizeof back, NULL)) return 1;
 *     puts(back);
 *     if (tkv_parse_config(&cfg, &arrays, toml, strlen(toml), reason, sizeof reason)) return puts(reason), 1;
 *     if (tkv_print_config(&cfg, TKV_TEXT_TOML, back, sizeof back, NULL)) return 1;
 *     puts(back);
 *     if (tkv_parse_config(&cfg, NULL, "tiers.hot_tokenz = 9", 20, reason, sizeof reason)) puts(reason);
 *     kv = NULL;
 * End of recipe
 *
 *
 * 7. MEMORY AND BUDGETS
 *
 *   Counting. All memory comes from cfg.host.allocator, as pages and a few growing tables. It is counted to the byte
 *   (tkv_get_memory). Pages hold blocks of one size, so blocks of different sizes do not fragment memory. tkv_attend
 *   never allocates. An append gets all memory that it needs before it stores a token. If that fails, no token is
 *   stored. tkv_estimate_memory forecasts the bytes of a config without a cache. It forecasts the end: on the way, a
 *   cache can hold twice as much (its comment has figures). tkv_seq_reset and tkv_seq_truncate give memory back: pages,
 *   and the ends of the tables.
 *
 *   Several tenants. With cfg.host.wipe_freed = 1, keys and values are overwritten with zeros when their memory becomes
 *   free. After tkv_seq_reset nothing of a sequence remains in pages and work space. A reset took 6.3 ms in place of
 *   4.2 (16 layers, 4 KV heads of 64, 8,192 tokens); appends took the same time.
 *
 *   In place. tkv_create_in_place works inside one buffer of yours and never allocates. tkv_get_required_bytes gives
 *   the size of the buffer. It needs cfg.limits.max_tokens. Under a budget, the size is the budget.
 *
 *   Budget. cfg.budget.bytes limits all memory of the cache at every moment: pages, tables, index and work space. The
 *   cache stays exact while memory is free. When the budget is full, old blocks are first coded in fewer bits, a few
 *   with each append, oldest first. The default ladder:
 *
 *     level 0   everything exact                          level 3   the plan of the config
 *     level 1   8 bits behind hot_tokens                  level 4   archive A25 + R20
 *     level 2   4 bits behind hot_tokens                  level 5   archive A20 + R15
 *
 *   After the ladder, the stages of chapter 9 follow, if the config has them. If all of them together free too
 *   little, the call returns TKV_ERR_BUDGET and stores nothing.
 *
 *   Pressure. The pressure is bytes used / budget, as a moving average. It starts level 1 at 80 % and the other
 *   levels at 95 %. cfg.budget.pressure has the thresholds, and the first and last level allowed. tkv_report_pressure
 *   adds a pressure from elsewhere, such as that of the whole process. With cfg.budget.pressure.jump = 1, one sample
 *   far above the average is enough. If it calls for two levels or more, the next append goes there at once. Set
 *   thresholds that rise with the levels for that. The level falls as without it: one at a time, by the average.
 *
 *   Levels have names. tkv_get_level gives the tag of a level, which is the text of its formats, and its bytes against
 *   FP16. They are the bytes of the blocks that the cache makes. tkv_find_level finds a level by its tag, for
 *   tkv_set_level. The default ladder with heads of 64 channels:
 *
 *     level    0     1      2         3         4         5
 *     tag      f16   q8     a40/r40   a30/r30   a25/r20   a20/r15
 *     factor   1     .531   .254      .191      .145      .113
 *
 *   With cfg.budget.pressure.min_level = 3, blocks are coded by age from the first token on, even while memory is
 *   free. The default level 0 keeps more precision, and codes more blocks later.
 *
 *   Measured: SmolLM2-135M read 3,840 tokens of WikiText-2 under a quarter of the bytes of FP16. The cache took at
 *   most 99.8 % of its budget. The perplexity was 17.789, and 17.795 with an exact cache. The command:
 *     make budget MODEL=... BUDGETS=25% ARGS='-f wiki.test.raw -c 4096 -n 256 --compare'
 *
 *   Events. cfg.host.on_event receives each change of level and each refusal. The callback runs inside the call that
 *   causes the event. It may call reports of the cache, and no other function of it.
 *
 *   Reserve. tkv_seq_reserve takes the memory of the next tokens in advance, in all layers. If it succeeds, the
 *   appends of that number of tokens cannot fail for memory. Under a budget, reserve before each chunk: a refusal
 *   then comes before the first layer has stored anything.
 *
 * Recipe R5: a budget
 *     static void on_event(void *user, const tkv_event *e) {
 *         (void)user;
 *         if (e->kind == TKV_EVENT_LEVEL) printf("level %d\n", e->to);
 *         if (e->kind == TKV_EVENT_BUDGET) printf("refused, it needs %zu bytes\n", e->bytes);
 *     }
 *     // main:
 *     cfg.budget.bytes = 400000;                           // of everything that the cache holds
 *     cfg.host.on_event = on_event;
 *     if (tkv_create_ex(&cfg, NULL, 0, &kv, reason, sizeof reason)) return puts(reason), 1;
 *     for (int n = 0; n < 6400; n += 64) {
 *         st = tkv_seq_reserve(kv, 0, 64);                 // memory in all layers, or no change
 *         if (st == TKV_ERR_BUDGET) {                      // the tightest level is full
 *             printf("full at %d tokens\n", tkv_get_length(kv, 0, TKV_ALL_LAYERS));
 *             if (tkv_set_budget(kv, 800000)) return 1;    // or tkv_seq_reset of another sequence
 *             st = tkv_seq_reserve(kv, 0, 64);
 *         }
 *         if (st) return puts(tkv_get_last_error(kv)), 1;
 *         for (int layer = 0; layer < LAYERS; layer++) {
 *             run_model(64);
 *             if (tkv_append(kv, 0, layer, k, v, 64) || tkv_attend(kv, 0, layer, q, 64, out)) return 1;
 *         }
 *     }
 *     tkv_budget_info info;
 *     if (tkv_get_budget(kv, &info)) return 1;
 *     printf("%d tokens, peak %s the budget\n", tkv_get_length(kv, 0, 0),
 *            info.peak <= info.budget ? "within" : "above");
 * End of recipe
 *
 *   TKV_ERR_BUDGET means that the last level allowed has nothing left to recode. The length of every layer is as
 *   before. A program can raise the budget, reset another sequence, or allow a stage of chapter 9.
 *
 *   A chat without end. Three ways keep the memory of a cache constant, however long the text gets:
 *     tkv_seq_slide      the oldest tokens behind the sinks go, and all later ones move up in index and position. So a
 *                        sequence never ends, in an arena for max_tokens. It needs the model's RoPE.
 *     a window           cfg.model.window; the sinks go, too. Indices and positions rise to max_tokens, by default
 *                        2^30 - 1. In place it takes 4 bytes per layer for each 64 positions.
 *     sliding eviction   cfg.evict; the sinks stay. Indices and positions rise as with a window. In place it takes
 *                        about 850 bytes more for each 64 positions. Set a budget: else it takes those of max_tokens.
 *
 * Recipe R2: a chat without end in a fixed arena
 *     cfg.limits.max_tokens = 1024;                        // tokens that the arena holds
 *     cfg.model.rope.dim = 32;                             // as the model rotates keys
 *     size_t bytes;
 *     if (tkv_get_required_bytes(&cfg, &bytes, NULL)) return 1;
 *     void *arena = malloc(bytes);
 *     if (tkv_create_in_place(&cfg, arena, bytes, &kv, NULL, 0)) return 1;
 *     int removed, total = 0;
 *     for (int turn = 0; turn < 400; turn++) {             // of 64 tokens each
 *         if (tkv_seq_slide(kv, 0, 64, &removed)) return 1;
 *         total += removed;                                // positions go on from tkv_get_length
 *         for (int layer = 0; layer < LAYERS; layer++) {
 *             run_model(64);
 *             if (tkv_append(kv, 0, layer, k, v, 64)) return puts(tkv_get_last_error(kv)), 1;
 *             if (tkv_attend(kv, 0, layer, q, 1, out)) return 1;
 *         }
 *     }
 *     printf("25600 tokens, %d held, %d gone\n", tkv_get_length(kv, 0, 0), total);
 *     tkv_destroy(kv);
 *     free(arena);
 *     kv = NULL;
 * End of recipe
 *
 *   Small contexts. A cache has costs that do not grow with its tokens. tkv_estimate_memory with one token shows
 *   them: the block of that token, tables, index and work space. A block has room for 64 tokens from its first token
 *   on. The exact part of the default plan is 4 sinks and 64 to 190 tokens. A and R formats code nothing before a
 *   layer has seen 256 tokens. Up to there, the default plan takes more bytes than plain FP16. Three things help
 *   below about 300 tokens:
 *     - A loaded calibration (R3): A and R formats then code from their first block on.
 *     - A format that learns nothing, such as KIVI4.
 *     - A shorter tail: hot_tokens = 16 keeps 16 to 142 newest tokens exact.
 *   The ratio is the bytes of plain FP16 / the bytes of the cache. The third row was measured, because an estimate
 *   assumes that no calibration is loaded. For the model in R7:
 *
 *     tokens                                128    192    256    320    384    512
 *     default plan                          0.90   0.92   0.92   1.55   1.75   2.00
 *     KIVI4 behind 16 hot tokens            1.18   1.50   1.73   1.90   2.12   2.31
 *     default, calibration, 16 hot tokens   1.14   1.46   1.76   1.94   2.16   2.43
 *
 *   These are tokens that come one by one. A chunk is exact until the next append, so use small chunks.
 *
 * Recipe R7: small contexts
 *     const int tokens[] = {1, 128, 256, 512};
 *     cfg.model.n_layers = 30;                             // SmolLM2-135M
 *     cfg.model.n_heads = 9;
 *     cfg.model.n_kv_heads = 3;
 *     cfg.model.head_dim = 64;
 *     tkv_config small = cfg;
 *     small.tiers.hot_tokens = 16;
 *     small.tiers.warm_tokens = TKV_UNLIMITED;             // one format behind the tail
 *     small.tiers.warm.k = TKV_KIVI4;                      // it learns nothing, so the first block is coded
 *     small.tiers.warm.v = TKV_KIVI4;
 *     for (int i = 0; i < 4; i++) {
 *         tkv_memory_info a, b;
 *         if (tkv_estimate_memory(&cfg, tokens[i], 1, &a)) return 1;
 *         if (tkv_estimate_memory(&small, tokens[i], 1, &b)) return 1;
 *         printf("%d tokens: default %zu bytes, ratio %.2f; small %zu bytes, ratio %.2f\n", tokens[i], a.total,
 *                a.ratio, b.total, b.ratio);
 *     }
 *     kv = NULL;
 * End of recipe
 *
 *
 * 8. STEPS AND AN EVEN FRAME TIME
 *
 *   Steps. tkv_seq_begin, the appends of all layers and tkv_seq_commit are one unit. tkv_seq_abort removes the tokens
 *   of an open step, so every layer is as long as before. An append inside a step codes no blocks: tkv_seq_begin does
 *   this work. A step has at most max_append tokens per layer. Use a step where a failure in one layer must not leave
 *   layers of different lengths, and for draft tokens that may be refused.
 *
 *   Work comes in blocks. After each 64 tokens, each layer has one block to code for WARM and one for ARCHIVE. Layers
 *   take turns: with n layers, these 2 n blocks are spread evenly over 64 tokens (tkv_tiers_config). So a step of up
 *   to 32 layers codes one block at most. `bench/steps` measures this. With a budget there are no turns, because need
 *   decides when blocks are coded: a token can take longer than its neighbours.
 *     tkv_seq_reserve   takes the memory of the next tokens now
 *     tkv_seq_flush     TKV_FLUSH_DUE codes now what the next append would code anyway
 *     tkv_maintain      the same for all sequences, at most max_work blocks, or until your function says stop
 *   Call tkv_maintain in an idle moment, with as many blocks as fit into it. What it leaves is coded by the appends.
 *   Under a budget it goes on until a tenth of the bytes is free. max_work of twice the number of layers per token
 *   leaves nothing to the appends. A learning layer makes its tables at 256, 512, 1,024 ... tokens, in tkv_maintain
 *   or in an append. Layers take turns for these as well, and blocks that waited for the first one are coded two by
 *   two. A loaded calibration (R3) avoids both.
 *
 *   The most blocks that a call codes, in one layer of one sequence without a budget. B: blocks of that layer. A block
 *   is decoded once and encoded once, for all KV heads. tests/white_cost.c counts.
 *
 *   call                                     blocks coded at most                         when
 *   append of n tokens, m in the last one    2 + (n + m) / 16                             many are due: a first table,
 *                                                                                         a smaller hot_tokens
 *     where no block waited                  2 (1 + (n + m) / 64)
 *     as parts                               the same; the last part codes those beyond 128 alone
 *     after cuts and flushes of partial      and B merged                                 half as many blocks again as
 *     blocks                                                                              the tokens need
 *     with cfg.evict                         and B merged for each batch                  few tokens stay of each block
 *     with cfg.promotion                     and per_step; reads per_step                 once in `every` tokens
 *     with offload.keep_exact                writes those that were exact
 *     after a fork                           and 1 copied                                 its last block is not full
 *   begin                                    an append of each layer
 *   flush                                    B of each layer
 *   maintain                                 max_work, merges included
 *   a table, in all calls above, and         0; decodes 16, keys twice, values once       KVQUANT: both three times
 *     freeze_calibration
 *     beyond the fourth, also in load        a third of the layer's coded blocks,         as many have each older table
 *                                            of all sequences
 *   evict                                    B of each layer, merged                      few tokens stay of each block
 *     by knorm, by keydiff                   and decodes keys of B once, twice            knorm: with sample_every
 *   restore, recompute                       3 for each block that returns                the level rose meanwhile
 *   free_bytes                               B of each layer                              with a budget
 *   load, load_from                          blocks of the file whose tables find no      the layer has four tables
 *                                            version; load_from reads each twice
 *     with attach                            0; reads none
 *   save, save_to, publish_prefix            0; reads each offloaded block once
 *   offload; discard                         0; writes n_blocks of each layer; 0
 *   truncate, fork, reorder, remove, shift,  0                                            later appends code; a fork
 *     copy, keep, slide, reset, pin,                                                      copies blocks of anchors
 *     set_sinks, put_state, get_state,
 *     adopt_prefix, commit, abort, reserve,
 *     set_level, set_hot_tokens, adapt_plan,
 *     load_calibration, fit_calibration
 *   with a budget: append, reserve, restore, all blocks of the cache, once a level        no page is free
 *     load, fork, put_state and all that
 *     take memory; set_budget                                                             a lower one
 *   attend, attend_part; R rows of query     0; reads B once for each 8 rows, rounded up  from a store or a model, too
 *     heads of a KV head
 *     with scores, sampled queries, a meter  twice as many                                attend_part: with a meter and
 *                                                                                         another three times as many
 *   attend_reference                         0; reads B twice for each row and up to four with scores three times
 *                                            query heads of a KV head
 *   read, read_tokens                        0; reads the blocks of each run of indices once
 *   promote, promote_important               0; reads 1, reads per_step
 *   reports, scores, tkv_check               0; read none
 *
 * Recipe R4: an even frame time
 *     cfg.budget.bytes = 4 << 20;                          // under a budget, few blocks wait for a table
 *     cfg.budget.pressure.min_level = 3;                   // the plan of the config from the first token on
 *     if (tkv_create(&cfg, &kv)) return 1;
 *     int idle = 0, done;
 *     for (int frame = 0; frame < 2000; frame++) {
 *         // Between frames: code up to 4 blocks, and take the memory of the next token.
 *         if (tkv_maintain(kv, 2 * LAYERS, NULL, NULL, &done)) return 1;
 *         if (tkv_seq_reserve(kv, 0, 1)) return 1;
 *         idle += done;
 *         // In the frame: one token.
 *         for (int layer = 0; layer < LAYERS; layer++) {
 *             run_model(1);
 *             if (tkv_append(kv, 0, layer, k, v, 1) || tkv_attend(kv, 0, layer, q, 1, out)) return 1;
 *         }
 *     }
 *     tkv_budget_info info;
 *     if (tkv_get_budget(kv, &info)) return 1;
 *     printf("%d blocks coded between frames, %d in frames\n", idle, (int)info.demoted - idle);
 * End of recipe
 *
 *
 * 9. LONG TEXTS
 *
 *   A text can need more bytes than there are. These are the means, in the order of what is lost. A full budget uses
 *   those that the config allows, in this order.
 *
 *   Compress. The ladder of chapter 7 comes first. All tokens stay part of attention.
 *
 *   Offload. cfg.offload is four functions of yours: write, read, prefetch and erase. The oldest blocks leave RAM for
 *   your store and stay part of attention, with the same bits. An XXH64 is checked for every part that comes back.
 *   Copy examples/spill_file.h for a file. tkv_offload offloads at once. Measured: `./spill --tokens 1M` keeps 62 MB
 *   of cache under a budget of 6.2 MB (examples/spill.c). About 40 bytes per block and layer stay in RAM, and 432
 *   more with cfg.evict.
 *
 *   Discard. cfg.budget.discard gives up blocks of sequences that wait, in all layers, oldest first. Before such a
 *   sequence goes on, tkv_seq_recompute has your model compute their K and V again. The bytes are then those of
 *   before. Until then, attention that needs them returns TKV_ERR_NO_SOURCE. examples/recompute.c has two
 *   conversations in 75 % of the bytes of both. Both texts and all logits are the same to the bit.
 *
 *   Recompute at access. Some models can give K and V of single tokens at any time: projections of inputs that they
 *   keep in fewer bytes, the first layer (it needs the token numbers alone), or an encoder's output. Then set
 *   cfg.recompute.compute. One long sequence under a budget discards its own oldest blocks, no token is lost, and no
 *   call by hand is needed. Attention asks for the rows of discarded blocks, 16 tokens of a head at a time, and sees
 *   them exactly. So it costs the work of the model at each step, and cost says how much of it is worth a byte:
 *     layer_params, n_heads   the FLOPs of a token: 2 layer_params, and attention over its prefix unless TKV_OFF
 *     quantize_price          blocks cheaper than this, in FLOPs a byte, go before the next level of the ladder
 *     step_flops              most FLOPs that all discarded blocks of a sequence may cost
 *     min_materialized        least tokens of a sequence that stay
 *
 * Recipe R10: keys and values from token numbers
 *     static int token[4096];                              // all that this model keeps
 *     static void embed(int number, int layer, int head, int side, float *row) {
 *         for (int i = 0; i < DIM; i++)
 *             row[i] = (float)((number * 31 + layer * 17 + head * 7 + side * 3 + i * 13) % 64) / 32.0f - 1.0f;
 *     }
 *     static int give_rows(void *user, int seq, int layer, int head, const int *at, int n, float *kr, float *vr) {
 *         int *calls = (int *)user;
 *         (void)seq;
 *         ++*calls;
 *         for (int i = 0; i < n; i++) {
 *             if (kr) embed(token[at[i]], layer, head, 0, kr + i * DIM);
 *             if (vr) embed(token[at[i]], layer, head, 1, vr + i * DIM);
 *         }
 *         return 0;
 *     }
 *     // main:
 *     int calls = 0;
 *     cfg.budget.bytes = 400000;                           // 4,096 tokens are 2,097,152 bytes in FP16
 *     cfg.recompute.compute = give_rows;
 *     cfg.recompute.user = &calls;
 *     cfg.recompute.cost.layer_params = 2 * DIM;           // two operations a number
 *     cfg.recompute.cost.n_heads = TKV_OFF;                // no attention over the prefix
 *     if (tkv_create_ex(&cfg, NULL, 0, &kv, reason, sizeof reason)) return 1;
 *     for (int n = 0; n < 4096; n++) {
 *         token[n] = n * n % 1000;
 *         for (int layer = 0; layer < LAYERS; layer++) {
 *             for (int head = 0; head < KV_HEADS; head++) {
 *                 embed(token[n], layer, head, 0, k + head * DIM);
 *                 embed(token[n], layer, head, 1, v + head * DIM);
 *             }
 *             if (tkv_append(kv, 0, layer, k, v, 1)) return 1;
 *         }
 *     }
 *     calls = 0;
 *     if (tkv_attend(kv, 0, 0, q, 1, out)) return 1;
 *     tkv_layer_info info;
 *     if (tkv_get_layer(kv, 0, 0, &info)) return 1;
 *     printf("%d tokens, %d of them discarded; attention asked %d times\n", info.length, info.discarded, calls);
 * End of recipe
 *
 *   Evict. cfg.evict removes tokens for good. With keep_tokens, each layer keeps that number. With keep_tokens 0,
 *   tokens go when a byte budget has no other way out. Tokens that stay keep their positions and rotation.
 *     tkv_evict              evicts now, for example at the end of a prompt, or the tokens of a mask
 *     tkv_seq_pin            keeps tokens, such as a system prompt, for good or up to a length
 *     tkv_find_top_tokens    the most important tokens of a layer
 *     tkv_get_tiers          the tier of each token, or its state (tkv_token_state)
 *     tkv_add_scores         adds attention scores of your own
 *
 *   Eviction is the last means, and it is off by default. With SmolLM2 and windows of 4,096 tokens, every policy was
 *   measured with a quarter of the tokens. Its KL divergence is 11 times that of the default tiers, or more. It
 *   takes more bytes, too. Of five passkeys it finds one at most; the tightest tiers find all five (bench/QUALITY.md,
 *   Dropping tokens). So compress first. Then add anchors, where the model's tokens need not move. In French prose 8
 *   anchors make the divergence of "balanced" .0021 instead of .0035, for 5 % more bytes: that of "quality", which
 *   takes 22 % more. Hundreds help less for their bytes: 64 anchors .0016 for 11 %, 256 .0011 for 32 %. Their bytes
 *   are constant, so they weigh less in longer texts. Evict from the tiers by a sliding window where old text may be
 *   forgotten. The bytes are then 7.0 times fewer than FP16, the divergence is .0081, and two passkeys are found.
 *
 *   Cost. A cache samples one query in 32 for attention scores: 1.5 to 2.8 % of the time of attention
 *   (build/bench/mass). TOVA, SnapKV and PyramidKV need the last queries before an eviction. While decoding, a cache
 *   takes one or two of 64 tokens, which costs less than 1 %. Random eviction leaves holes in blocks. Attention over
 *   them takes 9 to 41 % longer than over full blocks (bench/LOG.md).
 *
 *   Named sinks. Some models give much attention to tokens inside a text: delimiters, the first token of each document,
 *   patches of an image. tkv_seq_set_sinks names such tokens, best right after their append, while they are exact. They
 *   then stay exact, and no policy evicts them. In layers with window_sinks, queries see them from beyond the window.
 *   The unit is the block: all of its 64 tokens stay in the hot format. So a named sink costs the difference between a
 *   hot and a coded block in each layer. With F16, the default plan and one KV head of 128 channels these are 32,768
 *   bytes in the place of about 6,300. Behind a window they are 32,768 bytes in the place of none. Sinks of one block
 *   share this cost. Forks share the block, too. A full budget may offload it.
 *
 * Recipe R15: sinks inside a text
 *     cfg.model.window = 256;
 *     cfg.model.window_sinks = 1;
 *     if (tkv_create_ex(&cfg, NULL, 0, &kv, reason, sizeof reason)) return 1;
 *     for (int n = 0; n < 4000; n++) {
 *         run_model(1);
 *         for (int layer = 0; layer < LAYERS; layer++)
 *             if (tkv_append(kv, 0, layer, k, v, 1)) return 1;
 *         if (n % 1000 == 0 && tkv_seq_set_sinks(kv, 0, n, 1, 1)) return puts(tkv_get_last_error(kv)), 1;
 *     }                                                    // each document has 1,000 tokens
 *     if (tkv_attend(kv, 0, 0, q, 1, out)) return 1;
 *     tkv_layer_info info;
 *     if (tkv_get_layer(kv, 0, 0, &info)) return 1;
 *     printf("%d named sinks; %d of %d tokens have expired\n", info.named_sinks, info.expired, info.length);
 * End of recipe
 *
 *   Promote. tkv_promote brings a block back to a better form: an offloaded one into RAM, a coded one to exact if
 *   cfg.offload.keep_exact kept its exact bytes. tkv_promote_important does so for the most important blocks, a few
 *   at each step. Decoding restores nothing: without a better source the status is TKV_ERR_NO_SOURCE. With
 *   cfg.promotion.every appends do so by themselves, and code a block again when it matters no longer.
 *
 *
 * 10. QUALITY
 *
 *   Calibration. A and R formats learn which channels and heads attention reads most. A layer makes a first table
 *   after 256 tokens, over all sequences, and a new one each time that their number has doubled. Layers take turns,
 *   so some make a table up to 63 tokens later. Blocks that are due before the first stay in the next better tier until
 *   then. tkv_save_calibration gives the tables as bytes, which are the same on every machine. A cache that loads them
 *   compresses from its first block on, and does not learn. tkv_refresh_calibration learns anew, for example after a
 *   change of subject: the next table comes 256 tokens later. tkv_freeze_calibration makes missing tables at once and
 *   stops learning. examples/calibrate.c writes the tables of a model from any text (make calibrate).
 *
 * Recipe R3: loading a calibration
 *     size_t size;
 *     if (tkv_create(&cfg, &kv)) return 1;
 *     for (int n = 0; n < 2176; n += 64) {                 // each layer has the table of 2,048 tokens
 *         for (int layer = 0; layer < LAYERS; layer++) {
 *             run_model(64);
 *             if (tkv_append(kv, 0, layer, k, v, 64) || tkv_attend(kv, 0, layer, q, 64, out)) return 1;
 *         }
 *     }
 *     if (tkv_freeze_calibration(kv)) return puts(tkv_get_last_error(kv)), 1;
 *     if (tkv_save_calibration(kv, NULL, 0, &size)) return 1;           // NULL only counts
 *     void *bytes = malloc(size);
 *     if (!bytes || tkv_save_calibration(kv, bytes, size, &size)) return 1;
 *     tkv_destroy(kv);                                     // the bytes can go to a file here
 *
 *     if (tkv_create(&cfg, &kv)) return 1;                 // another cache of the same model
 *     st = tkv_load_calibration(kv, bytes, size);
 *     if (st == TKV_ERR_DATA) puts("damaged, or of another model: the cache learns by itself");
 *     else if (st) return puts(tkv_get_last_error(kv)), 1;
 *     for (int n = 0; n < 256; n += 64) {
 *         run_model(64);
 *         if (tkv_append(kv, 0, 0, k, v, 64)) return 1;
 *     }
 *     tkv_layer_info layer;
 *     if (tkv_get_layer(kv, 0, 0, &layer)) return 1;
 *     printf("%zu bytes; %d of 256 tokens are compressed\n", size, layer.tokens[TKV_TIER_WARM]);
 *     free(bytes);
 * End of recipe
 *
 *   Meter. cfg.meter.heads = 4 watches four KV heads while the cache runs. For sampled queries it compares attention
 *   with attention over exact copies. tkv_get_quality gives the mean error of the output, KL divergences, and how
 *   often the strongest key is the same. It takes at most 0.5 % of the time of attention, and 4 MB at head_dim 128.
 *   Output bits are the same with and without it.
 *
 *   Feedback. A score is 0 to 1, and 1 means no loss. tkv_compute_score makes one from the meter, from perplexities
 *   or from a task's accuracy. tkv_observe_score hands it to a controller of yours. tkv_adapt_plan asks the
 *   controller for advice on hot tokens and level, and follows it. Reset the meter between scores, every few hundred
 *   tokens. cfg.budget.adapt = 1 gives the cache levels around its plan, without a ladder of yours. With
 *   cfg.meter.target = .99 an append does all of this itself: the level follows the cache's own meter.
 *   A small model needs a smaller cfg.meter.every for enough samples. In 1,636 simulated drifts, quality
 *   was back after 86 scores at most (build/tests/test_feedback converges).
 *
 *   Thresholds. A threshold store keeps plans that were good, by model, layer and context length. It is an array of
 *   yours. tkv_put_threshold adds a plan, tkv_find_thresholds finds the nearest for the next cache, and
 *   tkv_apply_threshold sets it in a config. tkv_print_thresholds and tkv_parse_thresholds make it a text with a
 *   checksum. examples/thresholds.h keeps a store in a file (generate --thresholds FILE).
 *
 *
 * 11. BYTES
 *
 *   They are drawn in full at the parts that define them: core/tile.h, formats/exact.h, formats/kivi.h.
 *
 *   exact      [token][channel] little-endian, channels padded to 16
 *   coded      tiles of 256 codes, 1 to 6 or 8 bits each; KIVI: fp16 scale and zero per group of 64 or 32;
 *              A and R: scales of one byte, channels in an order that the cache learned (formats/a.h, formats/r.h)
 *              INT, FP, SUBSPACE: [token][channel] codes, then scales (formats/token.h, formats/subspace.h)
 *              KVQUANT: [token][channel] codes, then slots for outliers (formats/kvquant.h)
 *
 *   tkv_encode_block gives these bytes for one head's block. They are the same on every machine and instruction set,
 *   with the compiler's default floating-point flags. They decode to the same floats under any flags.
 *   tkv_get_block_bytes gives their number. Metadata is always included.
 *
 *   Saved files (persist/saved.h). All numbers are little-endian. Sections begin at multiples of 64, and the bytes
 *   between them are zero. So blocks lie in a file as they lie in a cache.
 *
 *     | head | model | tokens | tables, by layer | records, by layer | lists, by layer | states | index | end |
 *
 *   A journal is a saved sequence with later saves behind it, of the same form. Sections of a later save that have not
 *   changed are not written again: its index names those of former saves. So do its lists with records.
 *
 *     | first save | what the second one changed | ... | what the last one changed |
 *
 *   head     "TKVS" | u32 version | u64 end of this save | u64 XXH64 of the model's name | u32 layers | u32 length
 *            u32 flags: 1 token_meta, 2 scores, 4 a whole cache, 8 ends of lists | u32 tokens of the caller's
 *            zeros to 64
 *   model    u32 options | i32 value of each of cfg.format | for each layer:
 *            i32 layer with its K and V | u32 KV heads | u32 head_dim | u32 v_head_dim (+ 2^31: V is inside K)
 *            u64 RoPE
 *   tokens   i32 of the caller's each; sections of 4,096, numbered as if by layer
 *   table    u32 parts | u32 n | n times: u32 version | u32 1: current | the parts, as in a calibration
 *   record   bytes of a block, all heads, zeros to the size of its slot; slots without a token of the save are zeros
 *            u64 XXH64 of them, plus their place in the file | zeros to 64
 *   list     u32 n | u32 blocks of sinks | archive | warm | anchors | u32 length | u32 expired | u32 chunk_start
 *            u32 is_moved | u32 blocks | u32 runs of entries | u32 runs of blocks
 *            runs of entries | runs of blocks | token_meta [n], if a flag says so
 *            i32 position of the next token less the length | i32 position behind the expired tokens; both if a flag
 *            says so: where the tokens that are there do not tell them
 *   entries  u32 number of the first in the list | u32 first entry with its block | i32 start | u32 repeat | i32 shift
 *            i32 turned | i8 n_packed | u8 first_slot | u8 end_slot | u8 tier | u8 has_anchors | u8 step | 2 zeros
 *            u64 evicted_mask | u64 sink_mask
 *            `repeat` entries with these values, each with a block of its own, each `step` tokens behind the one before
 *   blocks   u8 format of K | u8 format of V | u8 capacity | u8 tier | u8 version of the table; 255: none | u8 step
 *            u8 rule | a zero | i32 first position | u32 repeat | u64 record of the first
 *            rule: 1 in A formats where head_dim is no multiple of allocation_unit, and for 4 channels below A30; else
 *            0. Older versions coded these keys with fewer bits and wrote 0; such blocks are refused
 *            `repeat` blocks, `step` positions apart, whose records follow each other
 *   meta     u64 pinned_mask | u64 temporary_mask | u64 anchored_mask | i32 temporary_until | i32 score_step
 *            i32 moved_at | u32 0 | 128 bytes: indices, 64 u16 or, in blocks of anchors, 32 i32 | scores [64] u32
 *   state    u32 layer | u32 n_tokens | u64 bytes | the bytes, zeros to 8
 *   cache    numbers of 8 bytes each, in the order of tkvi_visit_cache (persist/whole.h); only of a whole cache. Those
 *            of tkvi_visit_rest_of_config come last, and e1db1b6 and before did not write them
 *   index    for each section: u32 kind | u32 layer | u64 offset | u64 bytes | u64 XXH64; of records 0
 *            0 head, 1 model, 2 tokens, 3 tables, 4 records, 5 lists, 6 states, 7 cache
 *   end      u64 offset of the index | u64 offset of this save | u32 sections | u32 version
 *            u64 XXH64 of the index and these 24 bytes | "TKVSEND", a zero
 *
 *   A whole cache has records and lists of each sequence, numbered sequence * layers + layer, and states by sequence.
 *   Its runs are longer, since sequences share blocks, and since all that decides later bytes is saved:
 *
 *   entries  as above; the first entry with its block may be of an earlier sequence
 *            u32 sequence of that first entry | u32 sequence and u32 index of the block's next holder | u32 is_first
 *   blocks   as above | u16 layout | u16 previous layout | u16 slots that holders see | u16 0
 *   state    bytes 2^63 + q, and none behind: it is shared with sequence q
 *
 *
 * 12. NUMERICS
 *
 *   decoded value     scale * code + zero with one rounding: bit-identical everywhere
 *   attention         The reference is double precision on the decoded values. The error is at most 1e-5 for F32,
 *                     and 2e-3 for F16 and BF16. In coded tiers it is compared with the format's own error. The
 *                     ratio is at most a tenth in the root mean square over calls, and a quarter in one call of
 *                     four heads or more. A call of one head can reach half of the format's own error.
 *                     Keys of 4 bits and fewer beside values in 8 bits or exact are outside: the values
 *                     add no error of their own there, and the ratio reaches .14 and, in one call, 1.
 *                     With cfg.host.precise the error is at most 2e-3 in coded tiers as well.
 *                     These are errors relative to the whole output of random calls, for values up to the range of
 *                     FP16 and for logits with a standard deviation up to 4. They do not hold for inputs that are
 *                     made for it, such as values that cancel in the output (bounds for all inputs are below). Nor
 *                     do they hold for one-hot softmaxes, where a near tie may fall the other way, or for values
 *                     that a grid holds exactly, such as +-6e4 alone. The format's own error is 0 there, and
 *                     arithmetic errs by 1e-2 of the output
 *   threads           results are bit-identical with any number of threads, and without threads
 *   calls             the same calls in the same order give the same bits; other chunk sizes may not (below)
 *   not guaranteed    the same bits of attention on different instruction sets
 *
 *   tkv_attend_reference computes the reference: slowly, in double, on the decoded values.
 *
 *   Chunk sizes and other sequences. An answer is more than the text before it: it also depends on how that text was
 *   stored. The same text may therefore give other bits, for these reasons (tests/test_same_bits.c):
 *
 *     exact chunks       Tiers move when an append begins. So a chunk, and the tokens before it, are still exact while
 *                        the queries of the chunk run. In longer chunks, answers are nearer to exact.
 *     no warm tier       A chunk longer than warm_tokens takes blocks past the warm tier. They are coded once, from
 *                        exact values.
 *     learned tables     A, R and KVQUANT formats learn from all sequences of the cache, and SQUAT from their queries.
 *                        The first append behind 256 tokens makes a table, so chunk sizes count, too.
 *     a budget           The level, and when a block is coded, follow from the bytes of all sequences.
 *     shared blocks      A block stays in the hottest tier that one of its sequences has it in. So a fork changes how
 *                        its parent stores shared tokens later, and the reverse. Present answers stay.
 *     attention scores   Eviction and anchors go by scores, which come from some queries of each call. Chunk sizes
 *                        change them. Other sequences do not.
 *     many rows          Calls with 16 or more query rows for a KV head, and those with V inside K, may add in another
 *                        order in another batch. Exact tiers then differ by less than 1e-6, coded ones by the errors
 *                        of arithmetic above.
 *
 *   Learned tables and a skipped warm tier change an answer by at most the error that compression itself brings. A
 *   budget changes it by as much as another level does.
 *
 *   For the same bits from other chunk sizes: use a format that learns nothing, or a loaded or frozen calibration
 *   (but not SQUAT); no budget, eviction or anchors; chunks of at most warm_tokens, or no warm tier. What is stored
 *   is then the same, and so is the answer to a query that comes alone. Other sequences change no bit of it either,
 *   unless they share blocks. Tenants that must not see traces of each other need a cache each.
 *
 *   Bounds. Adversarial search holds what follows (tests/white_bounds.c, make bounds, bench/BOUNDS.md). They are
 *   for the worst finite values: on real texts errors are far smaller (bench/QUALITY.md).
 *
 *   Error of a decoded value x. b: bits of a code. M, R: largest |value| and range of the values that share a
 *   scale (tkv_scales). P: the largest of 16 channels. Without center_k.
 *
 *   format                at most                                                        |values| to
 *   F32                   0                                                              all
 *   F16                   |x| / 2049, at least 2^-25                                     65504
 *   BF16                  |x| / 257, at least 2^-134                                     3.38e38
 *   Q8, KIVI, SQUAT       R / (2^(b+1) - 2) + M / 2048 + 2^(b-25)                        65504
 *     TKV_FIT_CLIP        the larger of that and .28 R + M / 2048 + 2^(b-25)
 *   SUBSPACE, unrotated   as Q8, in parts of a token                                     65504
 *   INT                   1.001 M / (2^b - 2) + 2^(b-26)                                 65504
 *   FP8 E4M3              |x| / 16.9, at least M / 450000; and 2^-22                     65504
 *   FP8 E5M2              |x| / 8.9, at least M / 2^32; and 2^-21                        65504
 *   FP4                   |x| / 4.6, at least P / 22; and M / 450000 + 2^-19             65504
 *   KVQUANT4, 3, 2        g R + M / 1024 + 2^-22; g = .048, .078, .173                   32752
 *   A, a block's outlier  M / 118, M of the token less the means of the table            see below
 *
 *   KVQUANT: of a block alone, before RoPE, V without the values in slots; UNIFORM: g = 1 / (2^(b+1) - 2). Learned
 *   ranges of keys bound nothing beyond them but the values in slots. SQUAT in a cache and the other bits of
 *   tkv_fit trade the error of single values for sums; TKV_FIT_NORM keeps the root mean square of a group's errors
 *   below 1.5 of its standard deviation plus the bound above.
 *
 *   Rotated formats mix the channels of a token, so the root mean square of a token's errors is bounded. N: norm of
 *   the token, to 65504; r = N / sqrt(head_dim): its root mean square.
 *
 *   INT                   1.001 N / (2^b - 2) + 1e-5 r + 2^(b-26)
 *   FP8 E4M3, E5M2        r / 16.9 + N / 450000 + 2^-22; r / 8.9 + N / 2^32 + 2^-21
 *   FP4                   .28 r + N / 450000 + 2^-19
 *   SUBSPACE              N / (2^b - 1) / sqrt(2 subspaces) + N / 2048 + 2^(b-25)
 *   R                     1.03 c N + .03 r; c = 1/10, .15, 1/3, .3, 1 for 4, 3, 2, 1.5, 1 bits of the head
 *
 *   A: the root mean square of a channel's errors in a block, without the outlier, is at most c sigma + |m| / 14.
 *   sigma: its standard deviation, m: its mean less the table's. c = .6 for 4 to 6 bits, 1 for 3, 2.2 for 2, 1.5
 *   for 1, 1.001 for none. These c are what the search found, and some more.
 *
 *   Scales of A and R are for values like those of the table: from 2^-13 to 3.6 times the largest scale that it
 *   has seen. A block alone has scales of 2^-8 to 2^8: tested with norms of 1 to 100 (R), and channels that span
 *   .5 to 200 (A).
 *
 *   Attention, on the decoded values: an output value errs by at most e (1 + L) V. V is the largest |value|, L the
 *   largest sum of |scale q_c k_c| of a key, below 1000. e = 1e-5 for exact tiers and formats that are decoded
 *   before products, 5e-3 with cfg.host.precise, else .2: the weights of a block's other keys are rounded by the
 *   largest one. These e are what the search found for heads of 64 channels, and some more.
 *
 *   Very large values. F32 and BF16 store them exactly, but attention adds weights times values in floats before it
 *   divides. With n keys, the bound above holds for |values| up to 3.4e38 / n, and for |keys| up to 1.6e38. Calls
 *   with 16 or more query rows for a KV head take |values| up to 1.1e35 / n, because a weight can reach e^8 there.
 *   Larger values can give an infinity. tkv_attend_reference adds in double and does not overflow.
 *
 *
 * 13. ERRORS, THREADS, SIMD
 *
 *   Errors. Every function that can fail returns a tkv_status. After an error the cache is as it was, unless the
 *   comment of the function names an exception. tkv_get_last_error gives the sentence of the last call that failed.
 *   While several threads attend, tkv_validate_attend gives each its own. Where there is no cache yet, tkv_create_ex
 *   writes the sentence to a buffer of yours. The library never aborts and prints nothing. tkv_check tests all
 *   invariants of a cache, for tests and for suspicion.
 *
 *   Threads. A cache allows one writer at a time. Readers may run side by side between writes: tkv_attend, tkv_read
 *   and everything that takes a const tkv_cache. Different caches are independent. The library has no global
 *   variables that change.
 *
 *   The library starts no threads. With cfg.host.parallel_for, it hands tasks to a function of yours. The function
 *   runs each task once, in any order, on any threads, and returns when all are done. Its work space counts in the
 *   bytes of the cache. With V inside K, one call on a cache (four with parallel_for) works in memory of the cache.
 *   Calls beside it take up to twice as long, and so do all calls if the compiler lacks GCC's atomics. tkv_attend_part
 *   with part 0 of 1 avoids most of that, in a workspace of yours.
 *
 *   Stack of a call, at most, in KiB. Give worker threads that much. tests/test_stack.c and tests/white_stack.c measure
 *   it on x86-64, with gcc 12 and clang 14, scalar and with AVX-512, for heads of up to 576 channels:
 *
 *   call                                                     optimized              gcc -O0   clang -O0
 *   attend, attend_ex, attend_part                           128; clang 160         272       960
 *     more with cfg.offload, and with cfg.recompute          36, 68                 36, 68    36, 68
 *     more where tokens have moved                           44
 *   append, append_part and all that codes blocks: begin,    128                    144       192
 *     flush, maintain, evict, restore, recompute,
 *     free_bytes, set_budget, set_level; load, reserve,
 *     fork and others where they do (chapter 8)
 *   read, read_tokens                                        96                     128       192
 *   encode_block, decode_block, attend_reference             160                    160       160
 *   create, validate, estimate, calibrations                 64                     64        64
 *   offload, promote, promote_important                      40                     40        40
 *   others: changes of a sequence, states, saved sequences,  32                     32        32
 *     prefixes, reports, texts, thresholds, rules,
 *     merge_attention
 *
 *   An engine with jobs of its own calls tkv_attend_part instead. A call is n parts, with any n: each job computes one,
 *   in any order, and the last one to end merges. The parts share a workspace of yours (tkv_get_attend_bytes), which is
 *   cleared once. examples/threads_queue.c, threads_openmp.c and threads_std.cpp do so.
 *
 *     for (part = 0; part < n; part++)            // as jobs, or as iterations of a parallel loop
 *         st[part] = tkv_attend_part(kv, &call, part, n, workspace, bytes);
 *
 *   An append runs as parts in the same way (tkv_append_part). They share the encoding of blocks that the append
 *   demotes by age, in all sequences of its batch; the last part to end stores the new tokens. These blocks are left
 *   to it alone: all blocks under a budget; beyond 128 blocks of an append; in an append that makes a table or learns
 *   from queries; blocks that several entries of a sequence hold. tkv_seq_begin and tkv_seq_flush encode on one thread.
 *   A prompt gains most: one chunk demotes as many tokens as it brings.
 *
 * Recipe R14: an append as parts
 *     // main:
 *     static tkv_append_params append;
 *     size_t bytes;
 *     st = tkv_create(&cfg, &kv);
 *     append.k = k;
 *     append.v = v;
 *     append.n = TOKENS;
 *     for (int chunk = 0; chunk < 16 && st == TKV_OK; chunk++) {
 *         run_model(TOKENS);
 *         st = tkv_get_append_bytes(kv, &append, &bytes);   // grows with the blocks that are due
 *         void *workspace = calloc(1, bytes);
 *         for (int part = 0; part < 4 && st == TKV_OK; part++)   // as jobs
 *             st = tkv_append_part(kv, &append, part, 4, workspace, bytes);
 *         free(workspace);
 *     }
 *     printf("%d tokens\n", tkv_get_length(kv, 0, 0));
 * End of recipe
 *
 * Recipe R6: threads of a pool
 *     enum { THREADS = 3 };
 *     typedef struct worker {
 *         sem_t begin, end;
 *         tkv_task task;
 *         void *ctx;
 *         int first, n_tasks, n_done;
 *     } worker;
 *     static void *run_worker(void *user) {
 *         worker *w = (worker *)user;
 *         while (!sem_wait(&w->begin)) {
 *             for (int i = w->first; i < w->n_tasks; i += THREADS) {
 *                 w->task(w->ctx, i);
 *                 w->n_done++;
 *             }
 *             sem_post(&w->end);
 *         }
 *         return NULL;
 *     }
 *     static void parallel_for(void *user, int n_tasks, tkv_task task, void *ctx) {
 *         worker *pool = (worker *)user;
 *         for (int t = 0; t < THREADS; t++) {
 *             pool[t].task = task;
 *             pool[t].ctx = ctx;
 *             pool[t].n_tasks = n_tasks;
 *             sem_post(&pool[t].begin);
 *         }
 *         for (int t = 0; t < THREADS; t++) sem_wait(&pool[t].end);
 *     }
 *     // main:
 *     static worker pool[THREADS];                         // they wait until the program ends
 *     static float alone[sizeof out / sizeof *out];
 *     for (int t = 0; t < THREADS; t++) {
 *         pthread_t thread;
 *         pool[t].first = t;
 *         if (sem_init(&pool[t].begin, 0, 0) || sem_init(&pool[t].end, 0, 0)) return 1;
 *         if (pthread_create(&thread, NULL, run_worker, &pool[t])) return 1;
 *     }
 *     run_model(64);
 *     for (int with = 0; with < 2; with++) {               // the same work without and with threads
 *         cfg.host.parallel_for = with ? parallel_for : NULL;
 *         cfg.host.parallel_user = pool;
 *         tkv_destroy(kv);
 *         if (tkv_create(&cfg, &kv)) return 1;
 *         for (int n = 0; n < 1024; n += 64)
 *             if (tkv_append(kv, 0, 0, k, v, 64) || tkv_attend(kv, 0, 0, q, 64, out)) return 1;
 *         if (!with) memcpy(alone, out, sizeof out);
 *     }
 *     printf("%s bits, %s\n", memcmp(alone, out, sizeof out) ? "other" : "the same",
 *            pool[0].n_done ? "with tasks" : "without tasks");
 * End of recipe
 *
 *   Learning from attention, attention scores and the meter use atomics (gcc, clang).
 *
 *   SIMD. x86: AVX2+FMA+F16C, or AVX-512 F/BW/VL/DQ/VNNI, found by cpuid at tkv_create; cfg.host.isa forces one.
 *   AArch64: NEON, with dot products where the compiler may use them (-march=armv8.2-a+dotprod and later).
 *   WebAssembly: with -msimd128. Elsewhere: scalar C. The scalar code defines every result. With NEON and WebAssembly
 *   SIMD, encoding is scalar. tkv_get_build names the instruction sets here, and that of a cache.
 *
 *
 * 14. REPORTS
 *
 *   tkv_get_memory    bytes by tier and by purpose; their sum is what the allocator handed out
 *   tkv_get_layer     tokens and blocks of one layer of a sequence by tier, and its bytes
 *   tkv_seq_get_memory   bytes of a sequence, its own ones apart from those that it shares
 *   tkv_get_tiers     the tier of each token, or its state (tkv_token_state)
 *   tkv_get_budget    level, pressure, and counts of what was recoded, offloaded, discarded, evicted and refused
 *   tkv_get_quality   the figures of the meter
 *   tkv_print_report  all of this as JSON, or as text for Prometheus with labels of yours:
 *
 *     tkv_memory_bytes{part="codes",tier="archive",model="demo"} 4333568
 *
 *   The library writes to your buffer. The file, the socket and the HTTP header are yours. Reports take a const
 *   cache, so they may run beside attention. All texts follow one convention: (buf, size, needed), final zero
 *   included. buf NULL only counts.
 *
 *   The library measures no time. examples/latency.h has the time to the first token and between tokens, as
 *   percentiles and as histograms for Prometheus. generate and budget print them, and --metrics FILE writes a report
 *   with them.
 *
 *
 * 15. THE CUDA COMPANION
 *
 *   tieredkv_cuda.cu is one more file, for compute capability 8.0 and later. It keeps the same blocks, byte for byte,
 *   in device memory of yours. It appends with encoding and demotion on the device, and attends with 1 to 64 queries
 *   on the compressed tiers. tkvcu_import_seq copies a sequence of the CPU to the device, and tkvcu_export_seq
 *   copies it back. Calls captured once into a CUDA graph replay at any length. It has formats A, R, KIVI and Q8,
 *   F16 or BF16 in the hot tier, and heads of 64 or 128 channels. It has no budgets, eviction, offloading, anchors,
 *   named sinks and meters. The comment at its top is its manual; examples/cuda_decode.cu is a program.
 *
 *
 * 16. IN A RUNTIME
 *
 *   A runtime has a graph, threads, batches, masks and a memory interface of its own. This is where each of them meets
 *   the library. Four are built: ggml (examples/ggml_tkv.h), llama.cpp (examples/llama.patch), transformers
 *   (examples/python) and llama2.c (examples/llama2c.patch).
 *
 *   A graph. An operation cannot fail in the middle of a graph. tkv_seq_reserve takes the memory of the next tokens
 *   before it runs; after that no append of them lacks any, unless it has token_positions. If an operation fails in
 *   spite of that, keep the first status and its sentence, let the others do nothing, and ask at the end. An append
 *   leaves the sentence in tkv_get_last_error; for attention tkv_validate_attend has it, once tokens, q and out are
 *   there. tkv_seq_begin makes a step of all layers, which tkv_seq_abort takes back.
 *
 *   Threads. Operations get a thread's number and their count, and have no barrier inside. One thread appends, in an
 *   operation of its own. All threads attend: tkv_attend_part takes just these two numbers. A runtime that divides
 *   heads instead gives each thread, process or device its KV heads: first_kv_head and n_kv_heads.
 *
 *   Batches. `batch` of both calls takes tokens of several sequences, each sequence as one run of rows. Strides take
 *   views of a fused QKV tensor, and F16 and BF16 are read as they are. Rows padded on the left need not be stored:
 *   first_rows jumps over them.
 *
 *   Masks. A causal or sliding mask need not be read: the library knows both, by position. Other masks may be F16, may
 *   have a column for each cell of the runtime's cache (mask_cells), and a part for each head (mask_head_stride).
 *
 *   Memory. The names of three runtimes:
 *     llama.cpp                     transformers                 here
 *     seq_rm                        crop                         tkv_seq_truncate at the end, tkv_seq_remove elsewhere
 *     seq_cp                        batch_repeat_interleave      tkv_seq_fork; tkv_seq_copy for a part
 *     -                             reorder_cache                tkv_seq_reorder (whisper.cpp: beams)
 *     seq_keep                      batch_select_indices         tkv_seq_reset of the others; tkv_seq_reorder
 *     seq_add                       -                            tkv_seq_shift
 *     seq_pos_min, seq_pos_max      get_seq_length               tkv_get_positions, tkv_get_length
 *     state_seq_get_data, set_data  -                            tkv_seq_save, tkv_seq_load
 *     memory_breakdown              -                            tkv_get_memory
 *
 *   Cross-attention. Keys and values of an encoder are appended once, to a sequence of a second cache, and every query
 *   sees all of them (non_causal). All frames have the same age, so one plan should hold for all: warm_tokens
 *   TKV_UNLIMITED, and tkv_seq_flush when the last one is there. Several decoders may name the same sequence in one
 *   batch, of at most max_seqs entries. `scores` of one KV head are the weights from which word timestamps are made.
 *
 * Recipe R20: decoders that read an encoder
 *     enum { FRAMES = 1536 };
 *     const tkv_rows decoders[2] = {{0, 1}, {0, 1}};   // a query of each; both read sequence 0
 *     static float lse[2 * HEADS], weights[2][FRAMES];
 *     tkv_attend_params p = {0};
 *     tkv_memory_info memory;
 *     cfg.tiers.warm_tokens = TKV_UNLIMITED;           // frames have no age: all get the warm formats
 *     cfg.limits.max_seqs = 2;                         // most entries of a batch
 *     if (tkv_create(&cfg, &kv)) return 1;
 *     for (int frame = 0; frame < FRAMES; frame += TOKENS) {
 *         run_model(TOKENS);                           // K and V of an encoder's output
 *         if (tkv_append(kv, 0, 0, k, v, TOKENS) || tkv_append(kv, 0, 1, k, v, TOKENS)) return 1;
 *     }
 *     if (tkv_seq_flush(kv, 0, TKV_FLUSH_ALL) || tkv_get_memory(kv, &memory)) return 1;
 *     p.batch = decoders;
 *     p.n_batch = 2;
 *     p.non_causal = 1;
 *     p.q = q;
 *     p.out = out;
 *     p.first_kv_head = 1;                             // the KV head whose weights are wanted, and its 2 query heads
 *     p.n_kv_heads = 1;
 *     p.lse = lse;
 *     p.scores = weights[0];
 *     if (tkv_validate_attend(kv, &p, reason, sizeof reason)) return puts(reason), 1;
 *     if (tkv_attend_ex(kv, &p)) return 1;
 *     for (int decoder = 0; decoder < 2; decoder++) {
 *         float sum = 0.0f;
 *         for (int frame = 0; frame < FRAMES; frame++) sum += weights[decoder][frame];
 *         printf("decoder %d: the weights of 2 heads sum to %.3f\n", decoder, sum);
 *     }
 *     printf("%.1f times less than FP16\n", memory.ratio);
 * End of recipe
 *
 *
 * 17. IN YOUR BUILD
 *
 *   For every host: compile tieredkv.c of recipe R1 once, as C99 with -O2, and link libm. There is nothing to
 *   configure and no other file. Switches of chapter 2 go to this file; TKV_PREFIX, TKV_API and TKV_STATIC go to all
 *   that include the header. In a debug build keep -O2 for this file. What follows is what a host has beside that.
 *
 *   Bytes of text and data, by gcc 12 and clang 14, rounded:
 *     gcc -O2 -c tieredkv.c                                                             900 KB
 *     gcc -Os -DTKV_NO_SIMD -c tieredkv.c                                               440 KB
 *     gcc -Os -DTKV_CORE -DTKV_NO_SIMD -DTKV_NO_REPORTS -c tieredkv.c                   180 KB
 *     aarch64-linux-gnu-gcc -Os -DTKV_CORE -DTKV_NO_REPORTS -c tieredkv.c               290 KB
 *     examples/quickstart.c as WASM, clang -Os -msimd128: all that is linked            470 KB
 *     the same with -DTKV_CORE -DTKV_NO_REPORTS                                         320 KB
 *
 *   To update, put the new header in the place of the old one. tools/rename.py of the repository brings a tree to new
 *   names, by the tables of CHANGELOG.md, and lists what needs a person. Until 1.0 structs may grow with each minor
 *   version, so compile programs and shared libraries again.
 *
 *   ABI. These structs cross the boundary of a shared library: all of the header but tkv_cache, of which a program has
 *   a pointer alone. Bytes with 64-bit pointers (x86-64, AArch64, Windows too) and on i386, without tkv_ before names:
 *
 *     allocator 24/12             budget_config 80/72         memory_info 184/100         advice 32/28
 *     format_pair 8/8             meter_config 16/16          seq_memory_info 24/12       feedback_info 72/68
 *     rope 32/28                  host_config 72/44           pressure_info 56/56         feedback 4112/4112
 *     layer_config 104/100        config 608/500              budget_info 232/220         score_params 40/32
 *     level 28/28                 rows 8/8                    level_info 48/44            threshold 96/96
 *     pressure_config 52/52       append_params 112/64        layer_info 280/192          thresholds 16/12
 *     importance_config 32/32     attend_params 264/148       evict_params 64/36          codec 104/96
 *     promotion_config 16/16      save_info 32/20             ranked 8/8                  build_info 24/16
 *     evict_config 56/48          save_params 88/48           remat_block 40/28           config_arrays 48/24
 *     event 56/36                 load_params 80/44           remat_info 64/64            pressure 112/112
 *     offload_config 48/24        load_info 32/24             remat 136/128               token_importance 8/8
 *     remat_config 56/52          prefix_hash 32/32           promotion_state 48/48       evict_view 104/56
 *     recompute_config 72/60      prefix_extra 24/12          promotion 88/72             evict_result 20/20
 *     model_config 72/64          prefix_params 88/48         calibration_info 8/8        evict_budget 32/28
 *     limits_config 24/20         prefix_store 32/16          samples 48/32
 *     tiers_config 40/40          prefix_info 24/20           quality_info 64/60
 *     format_options 52/52        tier_bytes 24/12            feedback_config 24/24
 *
 *   tests/test_create.c compares them. No switch changes them, and C++ has the same. Enums have the size of an int.
 *   Other machines of 32 bits, such as ARM and WebAssembly, align numbers of 8 bytes otherwise than i386.
 *
 *   These are changes of the ABI: another size, field or meaning of a struct; another value of an enumerator; another
 *   signature of a function or callback; a function that goes. More functions and more enumerators are none. Until 1.0
 *   each minor version may bring one, and a patch brings none. So a program and a library need the same
 *   TKV_VERSION / 100: tkv_get_build gives the version of the library. Between releases R1 compares more: the whole
 *   version and config_bytes, the size of tkv_config. Ask before the first config is made.
 *
 *   The canaries at both ends of tkv_config are a second line. A config with a canary that is not 0 is refused. That
 *   finds one that was not filled with zeros, and as a rule one of another size. config_bytes always finds the size.
 *
 *   C. TKV_STATIC before the include makes a program of one file. Where a compiler should warn of a status that is
 *   not read, take the header from a system folder (gcc, clang):
 *
 *     cc -isystem FOLDER '-DTKV_API=__attribute__((warn_unused_result)) extern' -c program.c
 *
 *   C++. The declarations are extern "C", and nothing throws: -fno-exceptions and -fno-rtti are fine. tieredkv.c is
 *   also C++11. There is no tieredkv.hpp: a sketch of one took 69 lines for 12 of 122 functions, and saved 4 lines of
 *   a program of 25. Recipe R21 owns a cache, and the line above finds statuses that are not read. Lengths of arrays
 *   depend on the shape of each layer, which the tensors of a program know already.
 *
 * Recipe R21: a cache that C++ destroys
 *     #include <memory>
 *     struct destroy_cache {
 *         void operator()(tkv_cache *cache) const { tkv_destroy(cache); }
 *     };
 *     // main:
 *     tkv_cache *made;
 *     if (tkv_create_ex(&cfg, NULL, 0, &made, reason, sizeof reason) != TKV_OK) return puts(reason), 1;
 *     std::unique_ptr<tkv_cache, destroy_cache> cache(made);     // each return destroys it
 *     for (int token = 0; token < 300; token++) {
 *         run_model(1);
 *         if (tkv_append(cache.get(), 0, 0, k, v, 1) != TKV_OK) return 1;
 *         if (tkv_attend(cache.get(), 0, 0, q, 1, out) != TKV_OK) return 1;
 *     }
 *     printf("%d tokens\n", tkv_get_length(cache.get(), 0, 0));
 * End of recipe
 *
 *   CMake, Meson, Zig. The repository is a package of each. The compiled library is tieredkv::implementation in
 *   CMake, dependency('tieredkv-implementation') in Meson and artifact("tieredkv") in Zig. The header alone is
 *   tieredkv::tieredkv, dependency('tieredkv') and module("tieredkv"). packaging/ has vcpkg, Conan and pkg-config.
 *
 *     FetchContent_Declare(tieredkv GIT_REPOSITORY ... GIT_TAG ...)
 *     FetchContent_MakeAvailable(tieredkv)
 *     target_link_libraries(program tieredkv::implementation)
 *
 *   Rust. packaging/rust/tieredkv-sys compiles the library and declares its functions. CFLAGS takes switches.
 *
 *   Go. packaging/go is a package for cgo, with errors for statuses and checked lengths of slices. CGO_CFLAGS takes
 *   switches. -O2 comes with the package.
 *
 *   Python. `pip install ./examples/python` compiles the header once, and its arrays are those of numpy.
 *
 *   Lua, C# and all others that load a shared library: examples/love/tieredkv.lua and packaging/csharp/TieredKV.cs
 *   are one file each. Create by a text (tkv_create_ex): then no struct of a config is written down twice. Elsewhere
 *   compare config_bytes of tkv_get_build with the size of your own struct. LuaJIT has an FFI; Lua itself needs one.
 *
 *     cc -O2 -shared -fPIC tieredkv.c -o libtieredkv.so -lm
 *
 *   WebAssembly. Flags of clang with wasi-libc, as examples/web/build.py uses them. Emscripten 3.1.6 is tested with
 *   examples/quickstart.c and tests/test_sequence.c. Attention uses 128 KiB of stack and more (chapter 13), so the
 *   stack of 64 KiB that the linker gives is too small. Where wasm-opt is on the path, clang runs it if it links with
 *   -O, and that of Debian 12 refuses SIMD: then compile with -c, and link without -O.
 *
 *     clang --target=wasm32-wasi --sysroot=/usr -O3 -msimd128 -Wl,-z,stack-size=1048576 program.c tieredkv.c -lm
 *
 *   Android and iOS. clang compiles for these targets without their headers; AArch64 runs under Linux, by qemu.
 *
 *     $NDK/toolchains/llvm/prebuilt/linux-x86_64/bin/clang --target=aarch64-linux-android24 -O2 -c tieredkv.c
 *     xcrun -sdk iphoneos clang -arch arm64 -O2 -c tieredkv.c
 *
 *   Freestanding. With -ffreestanding -fno-builtin -DTKV_NO_MALLOC -DTKV_NO_SIMD the library needs the headers float.h,
 *   stddef.h, stdint.h, string.h and math.h, and the functions below. The smallest build adds -DTKV_CORE
 *   -DTKV_NO_REPORTS -O1; without optimization it needs those of all parts. tkv_create_in_place takes the memory, and
 *   tkv_get_required_bytes says how much.
 *
 *     build      libc                                          libm
 *     all parts  memcmp memcpy memmove memset strcmp strlen    exp expf fabsf log log1p logf sqrt sqrtf tanh tanhf
 *     smallest   memcmp memcpy memmove memset strcmp           exp expf fabsf log logf sqrt sqrtf tanh tanhf
 */
