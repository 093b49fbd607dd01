/*
 * test_fork.c - tkv_seq_fork: shared tokens, beam search, shared bytes (tkv_seq_get_memory), refusals, failed
 * allocations.
 *
 * Forks under random calls: test_everything.c. Shared blocks seen from inside: white_cache.c.
 */
#include "sequences.h"

/* >>tokens */
/* Two sequences of two caches attend alike. Their blocks may begin at different tokens, so sums are rounded
 * differently. */
static void check_same_attention(tkv_cache *a, int seq_a, tkv_cache *b, int seq_b) {
    float q[4 * KV_HEADS * DIM], out_a[4 * KV_HEADS * V_DIM], out_b[4 * KV_HEADS * V_DIM];
    tkv_rng rng = tkv_rng_seed(5);
    int layer;
    tkv_rng_fill(&rng, q, 4 * KV_HEADS * DIM, 1.0);
    for (layer = 0; layer < last_config.model.n_layers; layer++) {
        const int n = tkv_get_length(a, seq_a, layer) < 2 ? 1 : 2;
        CHECK_EQ(tkv_get_length(b, seq_b, layer), tkv_get_length(a, seq_a, layer));
        CHECK_EQ(tkv_attend(a, seq_a, layer, q, n, out_a), TKV_OK);
        CHECK_EQ(tkv_attend(b, seq_b, layer, q, n, out_b), TKV_OK);
        CHECK_LE(mean_squared_difference(out_a, out_b, n * 2 * KV_HEADS * V_DIM), 1e-12);
    }
}

/* A fork sees the tokens of its source, and only its own new ones. All tiers are F32, so reads are exact. */
TEST(forks_see_their_own_tokens) {
    static const int lengths[] = {1, 4, 40, 64, 68, 200, 700}, cuts[] = {0, 1, 30, 64};
    int i, c, layer;
    for (i = 0; i < COUNT(lengths); i++)
        for (c = 0; c < COUNT(cuts); c++) {
            const int n = lengths[i], kept = n > cuts[c] ? n - cuts[c] : 0;
            tkv_config cfg = make_f32_config(2, 3);
            tkv_cache *kv = create_cache(&cfg), *own[2];
            own[0] = create_cache(&cfg);
            own[1] = create_cache(&cfg);
            CHECK_EQ(append_to_all_layers(kv, 0, 1, n, 64), TKV_OK);
            CHECK_EQ(append_to_all_layers(kv, 2, 7, 100, 64), TKV_OK); /* the fork replaces this */
            CHECK_EQ(tkv_seq_fork(kv, 0, 2, cuts[c] ? kept : TKV_UNLIMITED), TKV_OK);
            check_cache_at(kv, "forked at", kept);
            CHECK_EQ(tkv_get_length(kv, 2, TKV_ALL_LAYERS), kept);
            CHECK_EQ(append_to_all_layers(own[0], 0, 1, n, 64), TKV_OK);
            CHECK_EQ(append_to_all_layers(own[1], 0, 1, kept, 64), TKV_OK);
            if (kept) check_same_attention(kv, 2, own[1], 0);
            CHECK_EQ(append_to_all_layers(kv, 2, 3, 90, 7), TKV_OK);
            CHECK_EQ(append_to_all_layers(own[1], 0, 3, 90, 7), TKV_OK);
            CHECK_EQ(append_to_all_layers(kv, 0, 2, 90, 7), TKV_OK);
            CHECK_EQ(append_to_all_layers(own[0], 0, 2, 90, 7), TKV_OK);
            check_cache_at(kv, "each wrote its own, after", kept);
            check_same_attention(kv, 0, own[0], 0);
            check_same_attention(kv, 2, own[1], 0);
            for (layer = 0; layer < 2; layer++) {
                if (kept) check_read(kv, 2, layer, 1, 0, kept, TKV_F32);
                check_read(kv, 2, layer, 3, kept, 90, TKV_F32);
                check_read(kv, 0, layer, 1, 0, n, TKV_F32);
                check_read(kv, 0, layer, 2, n, 90, TKV_F32);
            }
            CHECK_EQ(tkv_seq_reset(kv, 0), TKV_OK);
            check_cache_at(kv, "the source is gone, after", kept);
            check_same_attention(kv, 2, own[1], 0);
            CHECK_EQ(tkv_seq_truncate(kv, 2, kept / 2), TKV_OK);
            CHECK_EQ(tkv_seq_truncate(own[1], 0, kept / 2), TKV_OK);
            if (kept / 2) check_same_attention(kv, 2, own[1], 0);
            tkv_destroy(kv);
            tkv_destroy(own[0]);
            tkv_destroy(own[1]);
        }
}

/* What a fork does with its part of shared blocks takes no token from the source. It codes a block of which it sees the
 * first tokens alone, for all; it evicts tokens of blocks before they are coded, and its neighbours have space then. One
 * fork or two, as a block with two holders is not different from one with three. */
TEST(forks_take_no_token_from_their_source) {
    enum { SHORT, EVICTED, OWN_BEHIND, CASES };
    int n_forks, what, layer, i, seq;
    for (n_forks = 1; n_forks <= 2; n_forks++)
        for (what = 0; what < CASES; what++) {
            const int n = 4 + 5 * BLOCK, seen = what == SHORT ? 4 + 2 * BLOCK + 20 : n;
            tkv_config cfg = make_config(2, 3);
            uint64_t victims[(4 + 8 * BLOCK) / 64 + 1] = {0};
            tkv_cache *kv;
            cfg.tiers.hot = pair_of(TKV_F32, TKV_F32);
            cfg.tiers.warm = pair_of(TKV_Q8, TKV_Q8);
            cfg.tiers.archive = pair_of(TKV_KIVI4, TKV_KIVI4);
            cfg.tiers.hot_tokens = 6 * BLOCK;
            cfg.tiers.warm_tokens = 2 * BLOCK;
            cfg.evict.policy = TKV_EVICT_SLIDING;
            kv = create_cache(&cfg);
            CHECK_EQ(append_to_all_layers(kv, 0, 1, n, BLOCK), TKV_OK);
            for (seq = 1; seq <= n_forks; seq++) CHECK_EQ(tkv_seq_fork(kv, 0, seq, seen), TKV_OK);
            if (what !=
                SHORT) { /* 21 of 64 tokens stay in each block, so there is space for those of the next one */
                const int end = 4 + (what == EVICTED ? 4 : 6) * BLOCK;
                for (i = 4; i < end; i++)
                    if (i % 3) add_to_mask(victims, i);
                for (seq = 1; seq <= n_forks; seq++) {
                    if (what == OWN_BEHIND)
                        CHECK_EQ(append_to_all_layers(kv, seq, 1, 2 * BLOCK, BLOCK), TKV_OK);
                    CHECK_EQ(evict_tokens(kv, seq, TKV_ALL_LAYERS, victims, end), TKV_OK);
                }
            }
            check_cache_at(kv, "evicted by forks", n_forks);
            for (layer = 0; layer < 2; layer++) check_read(kv, 0, layer, 1, 0, n, TKV_F32);
            /* The source codes its blocks first, so the last fork codes the shared ones. */
            CHECK_EQ(tkv_seq_flush(kv, 0, TKV_FLUSH_ALL), TKV_OK);
            for (layer = 0; layer < 2; layer++) check_read(kv, 0, layer, 1, 0, 4 + 2 * BLOCK, TKV_F32);
            for (seq = 1; seq <= n_forks; seq++) CHECK_EQ(tkv_seq_flush(kv, seq, TKV_FLUSH_ALL), TKV_OK);
            check_cache_at(kv, "coded by forks", n_forks);
            for (layer = 0; layer < 2; layer++) {
                fill_rows(1, layer, 0, n, k_want, v_want);
                CHECK_EQ(tkv_read(kv, 0, layer, 0, n, k_out, v_out), TKV_OK);
                CHECK(memcmp(k_out + 4 * K_ROW, k_want + 4 * K_ROW, BLOCK * K_ROW * sizeof *k_out) != 0);
                for (i = 0; i < n; i++) {
                    CHECK_LE(float_difference(k_out + i * K_ROW, k_want + i * K_ROW, K_ROW), .25);
                    CHECK_LE(float_difference(v_out + i * V_ROW, v_want + i * V_ROW, V_ROW), .25);
                }
                for (i = 0; i < seen; i++) {
                    if (is_in_mask(victims, i)) continue;
                    CHECK_EQ(tkv_read(kv, 1, layer, i, 1, k_out, v_out), TKV_OK);
                    CHECK_LE(float_difference(k_out, k_want + i * K_ROW, K_ROW), .25);
                }
            }
            tkv_destroy(kv);
        }
}

/* Beam search: after each step every beam continues one of the old beams, chosen at random. */
TEST(beam_search_by_forks) {
    enum { BEAMS = 4, PROMPT = 150, STEPS = 50 };
    static int text[2 * BEAMS][PROMPT + STEPS]; /* the text that each token of a sequence comes from */
    static const tkv_format hot[] = {TKV_F32, TKV_F16};
    int f, step, b, t, layer;
    for (f = 0; f < 2; f++) {
        tkv_config cfg = f ? make_config(2, 2 * BEAMS) : make_f32_config(2, 2 * BEAMS);
        tkv_rng rng = tkv_rng_seed(8);
        tkv_cache *kv;
        double worst = 0.0;
        cfg.tiers.hot_tokens = 32;
        cfg.tiers.warm_tokens = 64;
        kv = create_cache(&cfg);
        CHECK_EQ(append_to_all_layers(kv, 0, 0, PROMPT, PROMPT), TKV_OK);
        memset(text, 0, sizeof text);
        for (b = 1; b < BEAMS; b++) CHECK_EQ(tkv_seq_fork(kv, 0, b, TKV_UNLIMITED), TKV_OK);
        for (step = 0; step < STEPS; step++) {
            const int from = step % 2 ? BEAMS : 0, to = BEAMS - from;
            for (b = 0; b < BEAMS; b++) { /* sequences from .. from + 3 become to .. to + 3 */
                const int source = from + tkv_rng_below(&rng, BEAMS), id = 1 + step * BEAMS + b;
                CHECK_EQ(tkv_seq_fork(kv, source, to + b, TKV_UNLIMITED), TKV_OK);
                memcpy(text[to + b], text[source], sizeof text[0]);
                text[to + b][PROMPT + step] = id;
                for (layer = 0; layer < 2; layer++) {
                    fill_rows(id, layer, PROMPT + step, 1, k_in, v_in);
                    CHECK_EQ(tkv_append(kv, to + b, layer, k_in, v_in, 1), TKV_OK);
                }
            }
            for (b = 0; b < BEAMS; b++) CHECK_EQ(tkv_seq_reset(kv, from + b), TKV_OK);
            check_cache_at(kv, "step", step);
            for (b = to; b < to + BEAMS; b++)
                for (layer = 0; layer < 2; layer++) {
                    const int n = PROMPT + step + 1;
                    double error;
                    for (t = 0; t < n; t++)
                        fill_rows(text[b][t], layer, t, 1, k_want + t * K_ROW, v_want + t * V_ROW);
                    CHECK_EQ(tkv_get_length(kv, b, layer), n);
                    CHECK_EQ(tkv_read(kv, b, layer, 0, n, k_out, v_out), TKV_OK);
                    error = mean_squared_difference(k_out, k_want, n * K_ROW);
                    if (error > worst) worst = error;
                    t = n - 1; /* the newest token is exact */
                    CHECK_LE(mean_squared_difference(k_out + t * K_ROW, k_want + t * K_ROW, K_ROW), 1e-6);
                }
        }
        CHECK_MSG(worst <= (f ? 0.1 : 0.0), "%s: keys are off by %g",
                  tkv_get_name(TKV_NAME_FORMAT, (int)hot[f]), worst);
        for (b = 0; b < 2 * BEAMS; b++) CHECK_EQ(tkv_seq_reset(kv, b), TKV_OK);
        check_cache_at(kv, "all beams are gone", 0);
        tkv_destroy(kv);
    }
}

/* A reorder is forks to spare sequences, and forks back. Lengths, states, pins and the order of sequences differ. */
TEST(a_reorder_is_forks_all_at_once) {
    enum { FIRST = 1, N = 5, STEPS = 40 };
    tkv_config cfg = make_config(2, FIRST + 2 * N);
    tkv_rng rng = tkv_rng_seed(12);
    tkv_cache *kv, *by_forks;
    int step, b, sources[N], state, read, layer;
    cfg.tiers.hot_tokens = 32;
    cfg.tiers.warm_tokens = 64;
    kv = create_cache(&cfg);
    by_forks = create_cache(&cfg);
    for (b = 0; b < FIRST + N; b++) {
        const int n = 40 + 70 * b;
        CHECK_EQ(append_to_all_layers(kv, b, b, n, 64), TKV_OK);
        CHECK_EQ(append_to_all_layers(by_forks, b, b, n, 64), TKV_OK);
        CHECK_EQ(tkv_seq_put_state(kv, b, 1, n, &b, sizeof b), TKV_OK);
    }
    for (step = 0; step < STEPS; step++) {
        size_t size = 0;
        for (b = 0; b < N; b++)
            sources[b] = step == 0   ? (b + 1) % N /* a cycle */
                         : step == 1 ? N - 1 - b
                         : step == 2 ? b
                                     : tkv_rng_below(&rng, N);
        CHECK_EQ(tkv_seq_reorder(kv, FIRST, sources, N), TKV_OK);
        check_cache_at(kv, "reordered", step);
        for (b = 0; b < N; b++)
            CHECK_EQ(tkv_seq_fork(by_forks, FIRST + sources[b], FIRST + N + b, TKV_UNLIMITED), TKV_OK);
        for (b = 0; b < N; b++) {
            CHECK_EQ(tkv_seq_fork(by_forks, FIRST + N + b, FIRST + b, TKV_UNLIMITED), TKV_OK);
            CHECK_EQ(tkv_seq_reset(by_forks, FIRST + N + b), TKV_OK);
        }
        for (b = 0; b < FIRST + N; b++) {
            check_same_attention(kv, b, by_forks, b);
            state = tkv_seq_find_state(kv, b, TKV_UNLIMITED);
            CHECK(state > 0 && state <= tkv_get_length(kv, b, 0));
            CHECK_EQ(tkv_seq_get_state(kv, b, 1, state, &read, sizeof read, &size), TKV_OK);
            CHECK_EQ(state, 40 + 70 * read); /* it went along with its tokens */
            for (layer = 0; layer < 2; layer++) {
                fill_rows(100 * step + b, layer, 0, 1, k_in, v_in);
                CHECK_EQ(tkv_append(kv, b, layer, k_in, v_in, 1), TKV_OK);
                CHECK_EQ(tkv_append(by_forks, b, layer, k_in, v_in, 1), TKV_OK);
            }
            check_same_attention(kv, b, by_forks, b);
        }
    }
    tkv_destroy(kv);
    tkv_destroy(by_forks);
}

/* The first fork takes what the sequence that the second one replaces gives back. */
TEST(a_reorder_counts_what_it_gives_back) {
    static const int sources[] = {0, 0, 2, 2}, lengths[] = {2000, 1, 1, 2000};
    tkv_config cfg = make_config(2, 4);
    tkv_cache *kv = create_cache(&cfg);
    int b;
    for (b = 0; b < 4; b++) CHECK_EQ(append_to_all_layers(kv, b, b, lengths[b], 500), TKV_OK);
    CHECK_EQ(tkv_seq_reorder(kv, 0, sources, 4), TKV_OK);
    check_cache_at(kv, "reordered", 0);
    for (b = 0; b < 4; b++) {
        CHECK_EQ(tkv_get_length(kv, b, TKV_ALL_LAYERS), lengths[sources[b]]);
        check_read(kv, b, 1, sources[b], lengths[sources[b]] - 1, 1, TKV_F16);
    }
    tkv_destroy(kv);
}

/* Under a budget with eviction, forks of many lengths get their room, or nothing changes but by events. */
TEST(reorders_under_a_budget) {
    enum { N = 6, CALLS = 60 };
    tkv_rng rng = tkv_rng_seed(3);
    int kind, call, b, n_done = 0, n_refused = 0;
    for (kind = 0; kind < 3; kind++) {
        tkv_config cfg = make_config(2, N);
        tkv_cache *kv;
        cfg.budget.bytes = kind == 2 ? 180000 : 300000;
        cfg.budget.discard = kind == 1;
        if (kind == 2) cfg.evict.policy = TKV_EVICT_SLIDING;
        kv = create_cache(&cfg);
        for (call = 0; call < CALLS && kv; call++) {
            int sources[N], lengths[N];
            tkv_status st;
            for (b = 0; b < N; b++) {
                const int n = 1 + tkv_rng_below(&rng, 150);
                sources[b] = tkv_rng_below(&rng, N);
                if (tkv_rng_below(&rng, 3)) (void)append_to_all_layers(kv, b, b, n, n);
                if (tkv_get_length(kv, b, 0) > 900) CHECK_EQ(tkv_seq_reset(kv, b), TKV_OK);
            }
            for (b = 0; b < N; b++) lengths[b] = tkv_get_length(kv, b, 0);
            st = tkv_seq_reorder(kv, 0, sources, N);
            for (b = 0; b < N; b++) CHECK_EQ(tkv_get_length(kv, b, 0), lengths[st ? b : sources[b]]);
            check_cache_at(kv, "call", call);
            n_done += !st;
            n_refused += st != TKV_OK;
        }
        tkv_destroy(kv);
    }
    CHECK(n_done > 30);
    CHECK(n_refused < 3 * CALLS);
}

/* Empty sequences have no lists of blocks, so their forks take no bytes of a budget that is full. */
TEST(empty_forks_take_no_memory) {
    static const int sources[] = {2, 2, 2};
    tkv_config cfg = make_config(2, 4);
    tkv_memory_info memory, after;
    tkv_cache *kv;
    cfg.budget.bytes = 1 << 20;
    cfg.evict.policy = TKV_EVICT_FIFO;
    kv = create_cache(&cfg);
    CHECK_EQ(append_to_all_layers(kv, 3, 3, 500, 60), TKV_OK);
    CHECK_EQ(tkv_get_memory(kv, &memory), TKV_OK);
    CHECK_EQ(tkv_set_budget(kv, memory.total), TKV_OK);
    CHECK_EQ(tkv_seq_fork(kv, 2, 1, TKV_UNLIMITED), TKV_OK);
    CHECK_EQ(tkv_seq_reorder(kv, 0, sources, 3), TKV_OK);
    CHECK_EQ(tkv_get_memory(kv, &after), TKV_OK);
    CHECK_LE(after.total, memory.total);
    check_read(kv, 3, 1, 3, 436, 64, TKV_F16);
    check_cache_at(kv, "forked", 0);
    tkv_destroy(kv);
}

/* A reorder whose forks need lists: a budget with few bytes left has room for all of them, or no token is evicted. */
TEST(a_reorder_counts_the_lists_of_all_forks) {
    static const int sources[] = {0, 0, 0};
    int left, n, n_done = 0, n_refused = 0;
    for (n = 0; n <= 500; n += 250) /* tokens that eviction may take */
        for (left = 0; left < 2048; left += 32) {
            tkv_config cfg = make_config(2, 4);
            tkv_memory_info memory;
            tkv_budget_info before, after;
            tkv_cache *kv;
            tkv_status st;
            cfg.budget.bytes = 1 << 20;
            cfg.evict.policy = TKV_EVICT_FIFO;
            kv = create_cache(&cfg);
            CHECK_EQ(append_to_all_layers(kv, 3, 3, n, 60), TKV_OK);
            CHECK_EQ(append_to_all_layers(kv, 0, 0, 3, 3), TKV_OK); /* sinks, which stay exact */
            CHECK_EQ(tkv_get_memory(kv, &memory), TKV_OK);
            CHECK_EQ(tkv_set_budget(kv, memory.total), TKV_OK); /* frees pages that are kept */
            CHECK_EQ(tkv_get_memory(kv, &memory), TKV_OK);
            CHECK_EQ(tkv_set_budget(kv, memory.total + (size_t)left), TKV_OK);
            CHECK_EQ(tkv_get_budget(kv, &before), TKV_OK);
            st = tkv_seq_reorder(kv, 0, sources, 3);
            CHECK(st == TKV_OK || st == TKV_ERR_BUDGET);
            CHECK_EQ(tkv_get_budget(kv, &after), TKV_OK);
            if (st) CHECK_EQ(after.evicted, before.evicted);
            CHECK_EQ(tkv_get_length(kv, 2, 0), st ? 0 : 3);
            check_cache_at(kv, "bytes left", left);
            n_done += !st;
            n_refused += st != TKV_OK;
            tkv_destroy(kv);
        }
    CHECK(n_done > 0 && n_refused > 0);
    printf(" %d reorders, %d refused ", n_done, n_refused);
}

/* Sequences that only change places keep their blocks: no memory is needed, and none is given back. */
TEST(a_permutation_takes_no_memory) {
    static const int cycle[] = {2, 0, 1}, same[] = {0, 1, 2};
    counting_allocator p;
    tkv_config cfg = make_config(2, 3);
    tkv_memory_info before, after;
    tkv_cache *kv;
    int b;
    cfg.host.allocator = counting_allocator_of(&p);
    kv = create_cache(&cfg);
    for (b = 0; b < 3; b++) CHECK_EQ(append_to_all_layers(kv, b, b, 100 * (b + 1), 64), TKV_OK);
    CHECK_EQ(tkv_get_memory(kv, &before), TKV_OK);
    p.fail_at = 1; /* any allocation would fail */
    CHECK_EQ(tkv_seq_reorder(kv, 0, cycle, 3), TKV_OK);
    CHECK_EQ(tkv_seq_reorder(kv, 0, same, 3), TKV_OK);
    CHECK_EQ(tkv_seq_reorder(kv, 0, NULL, 0), TKV_OK);
    p.fail_at = 0;
    CHECK_EQ(tkv_get_memory(kv, &after), TKV_OK);
    CHECK_MEM(&before, &after, sizeof before);
    for (b = 0; b < 3; b++) {
        CHECK_EQ(tkv_get_length(kv, b, TKV_ALL_LAYERS), 100 * (cycle[b] + 1));
        check_read(kv, b, 0, cycle[b], 100 * (cycle[b] + 1) - 1, 1, TKV_F16);
    }
    check_cache_at(kv, "permuted", 0);
    tkv_destroy(kv);
}

/* >>bytes */
enum { WIDE_LAYERS = 4, WIDE_ROW = 2 * 64 };

/* Appends n random tokens to all layers of a wide model. */
static void append_wide(tkv_cache *kv, int seq, int id, int n, int chunk) {
    static float k[64 * WIDE_ROW], v[64 * WIDE_ROW];
    tkv_rng rng = tkv_rng_seed((uint64_t)id);
    int layer;
    for (; n > 0; n -= chunk)
        for (layer = 0; layer < WIDE_LAYERS; layer++) {
            tkv_rng_fill(&rng, k, 64 * WIDE_ROW, 1.0);
            tkv_rng_fill(&rng, v, 64 * WIDE_ROW, 1.0);
            CHECK_EQ(tkv_append(kv, seq, layer, k, v, n < chunk ? n : chunk), TKV_OK);
        }
}

/* Tables of a wide model, to load. */
typedef struct saved_tables {
    uint8_t bytes[1 << 16];
    size_t n;
} saved_tables;

/* Bytes beyond those of an empty cache. n 0: of one sequence with `own` tokens. Else of n sequences with a common prompt
 * of 512 tokens, and `own` tokens each. flush 1: after tkv_seq_flush of all, as for characters that are silent. */
static size_t bytes_of_characters(const tkv_config *cfg, const saved_tables *tables, int n, int own,
                                  int flush) {
    counting_allocator p;
    tkv_config counted = *cfg;
    tkv_cache *kv;
    size_t bytes;
    int i;
    counted.host.allocator = counting_allocator_of(&p);
    kv = create_cache(&counted);
    CHECK_EQ(tkv_load_calibration(kv, tables->bytes, tables->n), TKV_OK);
    bytes = p.held;
    append_wide(kv, 0, 1, n ? 512 : own, 64);
    for (i = 1; i < n; i++) CHECK_EQ(tkv_seq_fork(kv, 0, i, TKV_UNLIMITED), TKV_OK);
    for (i = 0; i < n; i++) append_wide(kv, i, 2 + i, own, 1);
    for (i = 0; i < n && flush; i++) CHECK_EQ(tkv_seq_flush(kv, i, TKV_FLUSH_FULL), TKV_OK);
    check_cache_at(kv, "characters", n);
    bytes = p.held - bytes;
    tkv_destroy(kv);
    CHECK_EQ(p.held, 0);
    return bytes;
}

/* Eight characters with a common prompt. They take little more than the prompt and what each said. With tiers that
 * holds for silent ones: whoever talks has exact newest tokens, which bytes(640) - bytes(512) does not count. */
TEST(characters_share_their_prompt) {
    enum { N = 8 };
    static saved_tables tables;
    int tiered;
    for (tiered = 0; tiered < 2; tiered++) {
        tkv_config cfg = make_sized_config(WIDE_LAYERS, 8, 2, 64, N, 64);
        size_t prompt, own, both, all;
        tkv_cache *kv;
        if (!tiered) cfg.tiers.hot_tokens = TKV_UNLIMITED;
        kv = create_cache(&cfg);
        append_wide(kv, 0, 9, 640, 64);
        CHECK_EQ(tkv_save_calibration(kv, tables.bytes, sizeof tables.bytes, &tables.n), TKV_OK);
        tkv_destroy(kv);
        prompt = bytes_of_characters(&cfg, &tables, 0, 512, 0);
        own = bytes_of_characters(&cfg, &tables, 0, 128, 0);
        both = bytes_of_characters(&cfg, &tables, 0, 640, 0);
        all = bytes_of_characters(&cfg, &tables, N, 128, 0);
        CHECK_LE(all, prompt + N * own);
        if (tiered) all = bytes_of_characters(&cfg, &tables, N, 128, 1);
        CHECK_LE(all, 1.1 * (double)(prompt + N * (both - prompt)));
    }
}

/* What each sequence holds alone and shares, added up over all of them. */
static void check_bytes_add_up(tkv_cache *kv, int n_seqs) {
    size_t all = 0, once = 0, most_rounded = 0;
    tkv_memory_info memory;
    int seq, layer, tier;
    for (seq = 0; seq < n_seqs; seq++) {
        tkv_seq_memory_info m;
        size_t of_layers = 0;
        CHECK_EQ(tkv_seq_get_memory(kv, seq, &m), TKV_OK);
        for (layer = 0; layer < WIDE_LAYERS; layer++) {
            tkv_layer_info info;
            CHECK_EQ(tkv_get_layer(kv, seq, layer, &info), TKV_OK);
            of_layers += info.memory.total;
            for (tier = 0; tier < TKV_TIER_COUNT; tier++) most_rounded += (size_t)info.blocks[tier];
        }
        CHECK_EQ(m.own + m.shared, of_layers);
        CHECK(m.share <= m.shared);
        all += m.own + m.share;
    }
    CHECK_EQ(tkv_get_memory(kv, &memory), TKV_OK);
    for (tier = 0; tier < TKV_TIER_COUNT; tier++)
        once += memory.tier[tier].codes + memory.tier[tier].metadata;
    CHECK(all <= once && once - all <= most_rounded); /* heads of 64 channels have no padding */
}

/* Tokens that tkv_get_memory counts: those of a shared block once. */
static size_t tokens_held(tkv_cache *kv) {
    tkv_memory_info m;
    CHECK_EQ(tkv_get_memory(kv, &m), TKV_OK);
    return m.tier[0].tokens + m.tier[1].tokens + m.tier[2].tokens;
}

/* Bytes of a sequence's own are told apart from shared ones. */
TEST(own_bytes_are_told_from_shared_ones) {
    enum { N = 4 };
    tkv_config cfg = make_sized_config(WIDE_LAYERS, 8, 2, 64, N + 1, 64);
    tkv_seq_memory_info m, before;
    tkv_cache *kv;
    size_t n_tokens, of_tiers = 0;
    int i;
    cfg.model.rope.dim = 64;
    kv = create_cache(&cfg);
    CHECK_EQ(tkv_seq_get_memory(kv, 0, &m), TKV_OK);
    CHECK(m.own == 0 && m.shared == 0 && m.share == 0);
    append_wide(kv, 0, 1, 512, 64);
    CHECK_EQ(tkv_seq_get_memory(kv, 0, &before), TKV_OK);
    CHECK(before.own > 0 && before.shared == 0 && before.share == 0);
    for (i = 1; i < N; i++) CHECK_EQ(tkv_seq_fork(kv, 0, i, TKV_UNLIMITED), TKV_OK);
    for (i = 0; i < N; i++) {
        CHECK_EQ(tkv_seq_get_memory(kv, i, &m), TKV_OK);
        CHECK(m.own == 0);
        CHECK_EQ(m.shared, before.own);
        CHECK_EQ(m.share, before.own / N);
    }
    check_bytes_add_up(kv, N);
    for (i = 0; i < N; i++) append_wide(kv, i, 2 + i, 40 * (i + 1), 8);
    check_bytes_add_up(kv, N);
    CHECK_EQ(tkv_seq_get_memory(kv, 0, &before), TKV_OK);
    CHECK_EQ(tkv_seq_get_memory(kv, N - 1, &m), TKV_OK);
    CHECK(before.own > 0 && m.own > before.own && m.shared > 0);
    n_tokens = tokens_held(kv);
    CHECK_EQ(tkv_seq_shift(kv, 0, 100, 470, 7),
             TKV_OK); /* shared blocks have two entries in sequence 0 now */
    check_bytes_add_up(kv, N);
    CHECK_EQ(tkv_seq_get_memory(kv, 0, &m), TKV_OK);
    CHECK_EQ(m.own, before.own);
    CHECK_EQ(m.shared, before.shared);
    CHECK_EQ(tokens_held(kv), n_tokens);
    for (i = 1; i < N; i++) CHECK_EQ(tkv_seq_reset(kv, i), TKV_OK);
    CHECK_EQ(tkv_seq_get_memory(kv, 0, &m), TKV_OK);
    CHECK_EQ(m.own, before.own + before.shared); /* also of blocks with two entries */
    CHECK(m.shared == 0 && m.share == 0);
    CHECK_EQ(tokens_held(kv), WIDE_LAYERS * 552); /* also of blocks with two entries */
    check_bytes_add_up(kv, N);
    /* tokens copied back: the list holds their blocks twice, and not as neighbours */
    CHECK_EQ(tkv_seq_get_memory(kv, 0, &before), TKV_OK);
    CHECK_EQ(tkv_seq_fork(kv, 0, 1, TKV_UNLIMITED), TKV_OK);
    CHECK_EQ(tkv_seq_copy(kv, 1, 20, 300, 0, 700), TKV_OK);
    check_bytes_add_up(kv, N);
    CHECK_EQ(tkv_seq_get_memory(kv, 0, &m), TKV_OK);
    CHECK(m.own == 0);
    CHECK_EQ(m.shared, before.own);
    CHECK(m.share > before.own / 2); /* more of the holders are this sequence's */
    CHECK_EQ(tkv_seq_reset(kv, 1), TKV_OK);
    check_bytes_add_up(kv, N);
    CHECK_EQ(tkv_seq_get_memory(kv, 0, &m), TKV_OK);
    CHECK_EQ(m.own, before.own);
    CHECK(m.shared == 0 && m.share == 0);
    for (i = 0; i < WIDE_LAYERS; i++) {
        tkv_layer_info info;
        int tier;
        CHECK_EQ(tkv_get_layer(kv, 0, i, &info), TKV_OK);
        for (tier = 0; tier < TKV_TIER_COUNT; tier++)
            of_tiers += info.memory.tier[tier].codes + info.memory.tier[tier].metadata;
    }
    CHECK_EQ(of_tiers, before.own);
    CHECK_EQ(tkv_seq_get_memory(kv, N + 1, &m), TKV_ERR_ARG);
    CHECK_EQ(tkv_seq_get_memory(kv, 0, NULL), TKV_ERR_ARG);
    CHECK_EQ(tkv_seq_get_memory(NULL, 0, &m), TKV_ERR_ARG);
    tkv_destroy(kv);
}

/* >>failures */
static tkv_status fork_first(tkv_cache *kv, int to) { return tkv_seq_fork(kv, 0, to, TKV_UNLIMITED); }

/* Whether a fork gets its memory or not, no other sequence changes; without it, none does. */
TEST(forks_without_memory_change_nothing) {
    int budgeted, fail_at;
    for (budgeted = 0; budgeted < 2; budgeted++) {
        tkv_status st = TKV_ERR_NOMEM;
        for (fail_at = 1; st; fail_at++) {
            counting_allocator p;
            tkv_config cfg = make_config(2, 3);
            tkv_cache *kv;
            cfg.host.allocator = counting_allocator_of(&p);
            if (budgeted) cfg.budget.bytes = 1 << 20;
            kv = create_cache(&cfg);
            CHECK_EQ(append_to_all_layers(kv, 0, 0, 500, 100), TKV_OK);
            CHECK_EQ(append_to_all_layers(kv, 1, 1, 70, 100), TKV_OK);
            st = change_without_memory(kv, &p, fail_at, fork_first, 1);
            CHECK_EQ(fork_first(kv, 1), TKV_OK);
            CHECK_EQ(tkv_get_length(kv, 1, TKV_ALL_LAYERS), 500);
            tkv_destroy(kv);
            CHECK_EQ(p.held, 0);
        }
        CHECK(fail_at > 2); /* some allocations did fail */
    }
}

static const int heirs[] = {3, 0, 0, 3, 3};
static tkv_status reorder_heirs(tkv_cache *kv, int first) { return tkv_seq_reorder(kv, first, heirs, 5); }

/* So does a reorder of several forks. */
TEST(reorders_without_memory_change_nothing) {
    int budgeted, fail_at;
    for (budgeted = 0; budgeted < 2; budgeted++) {
        tkv_status st = TKV_ERR_NOMEM;
        for (fail_at = 1; st; fail_at++) {
            counting_allocator p;
            tkv_config cfg = make_config(2, 5);
            tkv_cache *kv;
            int b;
            cfg.host.allocator = counting_allocator_of(&p);
            if (budgeted) cfg.budget.bytes = 1 << 20;
            kv = create_cache(&cfg);
            CHECK_EQ(append_to_all_layers(kv, 0, 0, 300, 100), TKV_OK);
            CHECK_EQ(append_to_all_layers(kv, 1, 1, 70, 100), TKV_OK);
            CHECK_EQ(append_to_all_layers(kv, 3, 3, 500, 100), TKV_OK);
            st = change_without_memory(kv, &p, fail_at, reorder_heirs, 0);
            if (st) CHECK_EQ(reorder_heirs(kv, 0), TKV_OK);
            for (b = 0; b < 5; b++) CHECK_EQ(tkv_get_length(kv, b, TKV_ALL_LAYERS), heirs[b] ? 500 : 300);
            tkv_destroy(kv);
            CHECK_EQ(p.held, 0);
        }
        CHECK(fail_at > 3); /* some allocations did fail */
    }
}

/* A refused fork names its reason and changes nothing. */
/* The meter goes with the tokens that it watches. A shared block is coded for the fork that needed it exact last, and
 * the meter gets its copy from there. */
TEST(the_meter_goes_with_its_sequence) {
    NEEDS_ATOMICS;
    static const int swap[2] = {1, 0};
    static float q[2 * KV_HEADS * DIM], out[2 * KV_HEADS * V_DIM];
    tkv_config cfg = make_config(2, 4);
    tkv_quality_info quality;
    tkv_rng r = tkv_rng_seed(4);
    tkv_cache *kv;
    int i, layer;
    cfg.meter.heads = 2 * KV_HEADS;
    cfg.meter.tokens = 2048;
    cfg.meter.every = 1;
    kv = create_cache(&cfg);
    CHECK_EQ(append_to_all_layers(kv, 1, 1, 200, 50), TKV_OK);
    CHECK_EQ(tkv_seq_fork(kv, 1, 3, TKV_UNLIMITED), TKV_OK);
    for (i = 0; i < 8; i++) { /* by turns, as copies are kept from older blocks to newer ones */
        CHECK_EQ(append_to_all_layers(kv, 1, 1, 50, 50), TKV_OK);
        CHECK_EQ(append_to_all_layers(kv, 3, 2, 50, 50), TKV_OK);
        check_cache_at(kv, "meter", 0);
    }
    for (i = 0; i < 20; i++)
        for (layer = 0; layer < 2; layer++) {
            CHECK_EQ(append_tokens(kv, 1, layer, 1, 1), TKV_OK);
            tkv_rng_fill(&r, q, COUNT(q), 1.0);
            CHECK_EQ(tkv_attend(kv, 1, layer, q, 1, out), TKV_OK);
        }
    CHECK_EQ(tkv_get_quality(kv, TKV_ALL_LAYERS, &quality), TKV_OK);
    CHECK(quality.samples > 0);
    CHECK_NEAR(quality.coverage, 1.0, 1e-9); /* copies of all coded blocks, also of those that were shared */
    CHECK_EQ(quality.seq, 1);
    CHECK_EQ(append_to_all_layers(kv, 2, 3, 100, 50), TKV_OK);
    for (i = 0; i < 3; i++) {
        CHECK_EQ(tkv_seq_reorder(kv, 1, swap, 2), TKV_OK);
        CHECK_EQ(tkv_get_quality(kv, TKV_ALL_LAYERS, &quality), TKV_OK);
        CHECK_EQ(quality.seq, i % 2 ? 1 : 2);
        check_cache_at(kv, "meter", 1 + i);
    }
    tkv_destroy(kv);
}

/* Removals leave two short neighbours, of which a fork holds the first or the second one too. Merging them would change
 * the bytes that the other sequence reads, or code tokens again and free nothing. */
TEST(a_shared_block_is_not_merged) {
    enum { N = 4 + 6 * 64, WIDTH = 32 };
    static const uint64_t victim[N / 64 + 1] = {0, 0, 0, 0, 1}; /* a token behind them */
    static float k[N * WIDTH], v[N * WIDTH], was[2][N * WIDTH], now[N * WIDTH];
    int second;
    for (second = 0; second < 2; second++) {
        tkv_config cfg = make_sized_config(1, 2, 1, WIDTH, 2, 64);
        tkv_rng r = tkv_rng_seed(8);
        tkv_layer_info info;
        tkv_cache *kv;
        tkv_evict_params evict;
        int t, from, n_blocks;
        cfg.tiers.hot_tokens = TKV_OFF;
        cfg.tiers.warm = cfg.tiers.archive = pair_of(TKV_KIVI4, TKV_KIVI4);
        cfg.evict.policy = TKV_EVICT_SLIDING;
        kv = create_cache(&cfg);
        tkv_rng_fill(&r, k, N * WIDTH, 1.0);
        tkv_rng_fill(&r, v, N * WIDTH, 1.0);
        for (t = 0; t < N; t += t ? 64 : 4)
            CHECK_EQ(tkv_append(kv, 0, 0, k + t * WIDTH, v + t * WIDTH, t ? 64 : 4), TKV_OK);
        CHECK_EQ(tkv_seq_fork(kv, 0, 1, second ? TKV_UNLIMITED : 4 + 2 * 64), TKV_OK);
        for (t = tkv_get_length(kv, 1, 0); t < N; t += 64)
            CHECK_EQ(tkv_append(kv, 1, 0, k + t * WIDTH, v + t * WIDTH, 64), TKV_OK);
        if (second)
            CHECK_EQ(tkv_seq_remove(kv, 0, 4 + 64, 4 + 2 * 64), TKV_OK); /* the first is the fork's alone */
        from = second ? 4 + 2 * 64 : 0;
        CHECK_EQ(tkv_read(kv, 0, 0, from, N - from, was[0], v), TKV_OK);
        CHECK_EQ(tkv_read(kv, 1, 0, 4 + 64, 10, was[1], v), TKV_OK);
        CHECK_EQ(tkv_seq_remove(kv, 1, 4 + 64 + 10, 4 + 2 * 64), TKV_OK);
        CHECK_EQ(tkv_seq_remove(kv, 1, 4 + 2 * 64 + 10, 4 + 3 * 64), TKV_OK);
        CHECK_EQ(tkv_get_layer(kv, 1, 0, &info), TKV_OK);
        n_blocks = info.blocks[TKV_TIER_WARM] + info.blocks[TKV_TIER_ARCHIVE];
        memset(&evict, 0, sizeof evict);
        evict.seq = 1;
        evict.victims = victim;
        evict.n_victims = N;
        CHECK_EQ(tkv_evict(kv, &evict), TKV_OK); /* and merges */
        CHECK_EQ(tkv_get_layer(kv, 1, 0, &info), TKV_OK);
        CHECK_EQ(info.blocks[TKV_TIER_WARM] + info.blocks[TKV_TIER_ARCHIVE], n_blocks);
        CHECK_EQ(tkv_read(kv, 0, 0, from, N - from, now, v), TKV_OK);
        CHECK_MEM(now, was[0], (size_t)(N - from) * WIDTH * sizeof *now);
        CHECK_EQ(tkv_read(kv, 1, 0, 4 + 64, 10, now, v), TKV_OK);
        CHECK_MEM(now, was[1], 10 * WIDTH * sizeof *now);
        check_cache_at(kv, "not merged", second);
        tkv_destroy(kv);
    }
}

TEST(forks_are_refused_with_a_reason) {
    static const int beams[] = {1, 0}, beyond[] = {0, 2};
    tkv_config cfg = make_config(2, 3);
    snapshot before, after;
    tkv_cache *kv;
    cfg.model.window = 100;
    kv = create_cache(&cfg);
    CHECK_EQ(append_to_all_layers(kv, 0, 0, 700, 100), TKV_OK);
    CHECK_EQ(append_to_all_layers(kv, 1, 1, 70, 70), TKV_OK);
    before = snapshot_of_tokens(kv);
    CHECK_EQ(tkv_seq_fork(kv, 0, 0, 5), TKV_ERR_ARG);
    CHECK_STR(tkv_get_last_error(kv), "src and dst are both sequence 0");
    CHECK_EQ(tkv_seq_fork(kv, 0, 3, 5), TKV_ERR_ARG);
    CHECK_EQ(tkv_seq_fork(kv, -1, 1, 5), TKV_ERR_ARG);
    CHECK_EQ(tkv_seq_fork(kv, 0, 1, -5), TKV_ERR_ARG);
    CHECK_EQ(tkv_seq_fork(kv, 0, 1, 300), TKV_ERR_RANGE); /* the window dropped tokens that token 299 sees */
    CHECK_EQ(tkv_seq_reorder(kv, 0, beyond, 2), TKV_ERR_ARG);
    CHECK_STR(tkv_get_last_error(kv), "sources has 2; it must be 0 to n - 1");
    CHECK_EQ(tkv_seq_reorder(kv, 1, beams, 3), TKV_ERR_ARG);
    CHECK_STR(tkv_get_last_error(kv), "n is 3; there are fewer sequences from the first one on");
    CHECK_EQ(tkv_seq_reorder(kv, 3, beams, 1), TKV_ERR_ARG);
    CHECK_EQ(tkv_seq_reorder(kv, 0, NULL, 1), TKV_ERR_ARG);
    CHECK_EQ(tkv_seq_reorder(NULL, 0, beams, 1), TKV_ERR_ARG);
    after = snapshot_of_tokens(kv);
    CHECK(is_same_snapshot(&before, &after));
    free_snapshot(&before);
    free_snapshot(&after);
    CHECK_EQ(tkv_seq_begin(kv, 0), TKV_OK);
    CHECK_EQ(tkv_seq_fork(kv, 0, 1, 5), TKV_ERR_STATE);
    CHECK_EQ(tkv_seq_fork(kv, 1, 0, 5), TKV_ERR_STATE);
    CHECK_EQ(tkv_seq_reorder(kv, 0, beams, 2), TKV_ERR_STATE);
    CHECK_STR(tkv_get_last_error(kv), "a step is open; commit or abort it first: sequence 0");
    CHECK_EQ(tkv_seq_abort(kv, 0), TKV_OK);
    CHECK_EQ(tkv_seq_fork(kv, 0, 1, 690), TKV_OK);
    CHECK_EQ(tkv_get_length(kv, 1, TKV_ALL_LAYERS), 690);
    CHECK_EQ(tkv_seq_fork(kv, 2, 1, TKV_UNLIMITED), TKV_OK); /* a fork of an empty sequence is empty */
    CHECK_EQ(tkv_get_length(kv, 1, TKV_ALL_LAYERS), 0);
    tkv_destroy(kv);
}

/* Under a budget, a shared prompt counts once: many forks of it fit where few copies would. */
TEST(a_budget_counts_shared_tokens_once) {
    tkv_config cfg = make_sized_config(WIDE_LAYERS, 8, 2, 64, 16, 64);
    tkv_memory_info memory;
    size_t one;
    tkv_cache *kv = create_cache(&cfg);
    int i;
    append_wide(kv, 0, 1, 2048, 64);
    CHECK_EQ(tkv_get_memory(kv, &memory), TKV_OK);
    one = memory.total;
    tkv_destroy(kv);
    cfg.budget.bytes = 4 * (uint64_t)one; /* 16 copies would not fit */
    kv = create_cache(&cfg);
    append_wide(kv, 0, 1, 2048, 64);
    for (i = 1; i < 16; i++) CHECK_EQ(tkv_seq_fork(kv, 0, i, TKV_UNLIMITED), TKV_OK);
    for (i = 1; i < 16; i++) append_wide(kv, i, i, 16, 16);
    CHECK_EQ(tkv_get_memory(kv, &memory), TKV_OK);
    CHECK_LE(memory.total, cfg.budget.bytes);
    check_cache_at(kv, "forks under a budget", 16);
    tkv_destroy(kv);
}

/* A discarded block whose other holders are gone is restored in the format of its tier, though it aged meanwhile. */
TEST(a_discarded_block_ages_in_a_fork) {
    enum { N = 230 };
    tkv_config cfg = make_sized_config(WIDE_LAYERS, 8, 2, 64, 2, N); /* with formats that wait for a table */
    static float k[N * WIDE_ROW], v[N * WIDE_ROW];
    int n = 0, start = 0, layer;
    tkv_cache *kv = create_cache(&cfg);
    append_wide(kv, 0, 1, N / 10 * 10, 10);
    append_wide(kv, 0, 2, 70, 10);
    CHECK_EQ(tkv_seq_discard(kv, 0, N, &n), TKV_OK);
    CHECK(n >= 128);
    CHECK_EQ(tkv_seq_fork(kv, 0, 1, n), TKV_OK);
    CHECK_EQ(tkv_seq_flush(kv, 1, TKV_FLUSH_FULL), TKV_OK);
    check_cache_at(kv, "flushed", n);
    CHECK_EQ(tkv_seq_reset(kv, 0), TKV_OK);
    CHECK_EQ(tkv_seq_find_discarded(kv, 1, &start, &n), TKV_OK);
    CHECK(n >= BLOCK && n <= N);
    for (layer = 0; layer < WIDE_LAYERS; layer++) CHECK_EQ(tkv_restore(kv, 1, layer, start, k, v, n), TKV_OK);
    check_cache_at(kv, "restored", n);
    append_wide(kv, 1, 3, 100, 10);
    check_cache_at(kv, "and older", n);
    tkv_destroy(kv);
}

/* Each sequence restores a discarded block that both hold with its own rows. */
TEST(forks_restore_discarded_blocks_alone) {
    enum { N = 400 };
    tkv_config cfg = make_config(2, 2);
    tkv_cache *kv = create_cache(&cfg), *plain = create_cache(&cfg);
    int n = 0, start = 0, seq, layer, left;
    CHECK_EQ(append_to_all_layers(kv, 0, 1, N, 50), TKV_OK);
    CHECK_EQ(append_to_all_layers(plain, 0, 1, N, 50), TKV_OK);
    CHECK_EQ(tkv_seq_fork(plain, 0, 1, TKV_UNLIMITED), TKV_OK);
    CHECK_EQ(tkv_seq_discard(kv, 0, N, &n), TKV_OK);
    CHECK(n >= 3 * BLOCK);
    CHECK_EQ(tkv_seq_fork(kv, 0, 1, TKV_UNLIMITED), TKV_OK);
    for (seq = 1; seq >= 0; seq--) {
        CHECK_EQ(tkv_seq_find_discarded(kv, seq, &start, &left), TKV_OK);
        CHECK_EQ(left, n);
        for (layer = 0; layer < 2; layer++) {
            fill_rows(1, layer, start, left, k_in, v_in);
            CHECK_EQ(tkv_restore(kv, seq, layer, start, k_in, v_in, left), TKV_OK);
        }
        check_cache_at(kv, "restored", seq);
        CHECK_EQ(tkv_seq_find_discarded(kv, seq, &start, &left), TKV_OK);
        CHECK_EQ(left, 0);
        if (seq) CHECK_EQ(tkv_read(kv, 0, 0, BLOCK, 1, k_out, v_out), TKV_ERR_NO_SOURCE);
        check_same_attention(kv, seq, plain, seq);
    }
    tkv_destroy(kv);
    tkv_destroy(plain);
}

/* A fork onto a sequence whose tokens eviction takes meanwhile gets its memory, or is refused before it loses any. */
TEST(forks_under_a_budget_evict_or_are_refused) {
    int budget, seq, n, n_forks = 0, n_evicting = 0;
    for (budget = 80000; budget < 200000; budget += 4000)
        for (n = 96; n < 480; n += 36) {
            tkv_config cfg = make_config(2, 3);
            tkv_budget_info before, after;
            tkv_memory_info memory;
            snapshot was;
            tkv_status st;
            tkv_cache *kv = NULL;
            cfg.evict.policy = (tkv_evict_policy)(n / 12 % 2 ? TKV_EVICT_FIFO : TKV_EVICT_SLIDING);
            cfg.budget.bytes = (size_t)budget;
            if (tkv_create(&cfg, &kv)) continue;
            note_config(&cfg);
            for (seq = 2; seq >= 0; seq--)
                (void)append_to_all_layers(kv, seq, seq, seq == 2 ? n : 700 - 300 * seq, 60);
            CHECK_EQ(tkv_get_memory(kv, &memory), TKV_OK);
            (void)tkv_set_budget(kv, memory.total); /* a longer index takes bytes of tokens */
            CHECK_EQ(tkv_get_budget(kv, &before), TKV_OK);
            was = snapshot_of_tokens(kv);
            st = tkv_seq_fork(kv, 0, 2, TKV_UNLIMITED);
            CHECK_EQ(tkv_get_budget(kv, &after), TKV_OK);
            CHECK_MSG(st == TKV_OK || st == TKV_ERR_BUDGET, "budget %d: %d, %s", budget, (int)st,
                      tkv_get_last_error(kv));
            if (st) {
                snapshot is = snapshot_of_tokens(kv);
                CHECK_MSG(is_same_snapshot(&was, &is), "budget %d: a refused fork changed tokens", budget);
                free_snapshot(&is);
            }
            n_forks += !st;
            n_evicting += !st && after.evicted > before.evicted;
            free_snapshot(&was);
            check_cache_at(kv, "budget", budget);
            tkv_destroy(kv);
        }
    CHECK(n_forks > 100 && n_evicting > 0);
    printf(" %d forks, %d evicted ", n_forks, n_evicting);
}

/* Under a budget a fork evicts tokens of its own, though the oldest ones are those that it shares: evicting these would
 * free no page while another sequence has them. */
TEST(forks_evict_no_shared_tokens) {
    enum { PROMPT = 4 + 4 * BLOCK, FIRST = 14 * BLOCK, OWN = 26 * BLOCK };
    int n_forks, layer, t;
    for (n_forks = 1; n_forks <= 2; n_forks++) {
        tkv_config cfg = make_config(2, 3);
        tkv_memory_info memory;
        tkv_budget_info b;
        tkv_cache *kv;
        cfg.tiers.hot_tokens = TKV_OFF;
        cfg.budget.pressure.max_level = TKV_OFF;
        cfg.evict.policy = TKV_EVICT_SLIDING;
        cfg.evict.recent_tokens = 32;
        cfg.budget.bytes = 1000000;
        kv = create_cache(&cfg);
        CHECK_EQ(append_to_all_layers(kv, 0, 1, PROMPT, BLOCK), TKV_OK);
        for (t = 1; t <= n_forks; t++) CHECK_EQ(tkv_seq_fork(kv, 0, t, TKV_UNLIMITED), TKV_OK);
        CHECK_EQ(append_to_all_layers(kv, 1, 2, FIRST, 1), TKV_OK);
        CHECK_EQ(tkv_get_memory(kv, &memory), TKV_OK);
        CHECK_EQ(tkv_set_budget(kv, memory.total), TKV_OK);
        CHECK_EQ(append_to_all_layers(kv, 1, 2, OWN - FIRST, 1), TKV_OK);
        CHECK_EQ(tkv_get_budget(kv, &b), TKV_OK);
        for (layer = 0; layer < 2; layer++) {
            uint8_t tiers[PROMPT + OWN];
            int n_gone[2] = {0, 0};
            CHECK_EQ(tkv_get_tiers(kv, 1, layer, 0, PROMPT + OWN, tiers), TKV_OK);
            for (t = 0; t < PROMPT + OWN; t++) n_gone[t >= PROMPT] += tiers[t] == TKV_TOKEN_GONE;
            CHECK_MSG(n_gone[0] == 0 && n_gone[1] > 0,
                      "%d forks, layer %d: %d shared tokens and %d of the fork's own are gone", n_forks,
                      layer, n_gone[0], n_gone[1]);
        }
        CHECK(b.evicted > 0);
        check_cache_at(kv, "evicted with forks", n_forks);
        tkv_destroy(kv);
    }
}

/* Two sequences that share their last block append in one call: one goes on in the block, and the other one gets a copy,
 * whose slot the call must have taken before. Other tokens fill the pages, so that in some rounds no slot is left. */
TEST(a_batch_has_a_copy_of_a_shared_tail) {
    enum { TAIL = 20, ROUNDS = 70 };
    int round, seq;
    for (round = 0; round < ROUNDS; round++) {
        static const tkv_rows rows[2] = {{0, 1}, {1, 1}};
        tkv_config cfg = make_f32_config(1, 3);
        tkv_cache *kv = create_cache(&cfg);
        tkv_append_params p;
        memset(&p, 0, sizeof p);
        CHECK_EQ(append_to_all_layers(kv, 2, 3, 4 + round * BLOCK / 2, BLOCK), TKV_OK);
        CHECK_EQ(append_to_all_layers(kv, 0, 1, TAIL, TAIL), TKV_OK);
        CHECK_EQ(tkv_seq_fork(kv, 0, 1, TKV_UNLIMITED), TKV_OK);
        for (seq = 0; seq < 2; seq++) fill_rows(5 + seq, 0, TAIL, 1, k_in + seq * K_ROW, v_in + seq * V_ROW);
        p.batch = rows;
        p.n_batch = 2;
        p.k = k_in;
        p.v = v_in;
        CHECK_EQ(tkv_append_ex(kv, &p), TKV_OK);
        for (seq = 0; seq < 2; seq++) {
            check_read(kv, seq, 0, 1, 0, TAIL, TKV_F32);
            check_read(kv, seq, 0, 5 + seq, TAIL, 1, TKV_F32);
        }
        check_cache_at(kv, "appended together, round", round);
        tkv_destroy(kv);
    }
}

int main(int argc, char **argv) {
    tkv_test_begin(argc, argv);
    RUN(forks_see_their_own_tokens);
    RUN(forks_take_no_token_from_their_source);
    RUN(beam_search_by_forks);
    RUN(a_reorder_is_forks_all_at_once);
    RUN(a_reorder_counts_what_it_gives_back);
    RUN(reorders_under_a_budget);
    RUN(empty_forks_take_no_memory);
    RUN(a_reorder_counts_the_lists_of_all_forks);
    RUN(a_permutation_takes_no_memory);
    RUN(characters_share_their_prompt);
    RUN(own_bytes_are_told_from_shared_ones);
    RUN(forks_without_memory_change_nothing);
    RUN(reorders_without_memory_change_nothing);
    RUN(the_meter_goes_with_its_sequence);
    RUN(a_shared_block_is_not_merged);
    RUN(forks_are_refused_with_a_reason);
    RUN(a_budget_counts_shared_tokens_once);
    RUN(a_discarded_block_ages_in_a_fork);
    RUN(forks_restore_discarded_blocks_alone);
    RUN(forks_under_a_budget_evict_or_are_refused);
    RUN(forks_evict_no_shared_tokens);
    RUN(a_batch_has_a_copy_of_a_shared_tail);
    return tkv_test_end();
}
