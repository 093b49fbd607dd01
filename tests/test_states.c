/*
 * test_states.c - states of layers without keys: put, got, found, shared, cut, thinned out, counted and refused.
 */
#include "sequences.h"

#include <stdint.h>

enum { LAYERS = 4, STATEFUL = 3, STEP = 64, MOST_BYTES = 1 << 16 };

static unsigned char bytes_in[MOST_BYTES], bytes_out[MOST_BYTES];

/* >>models and states */
/* The last layer has keys, the others have states. */
static tkv_config make_hybrid_config(tkv_layer_config *layers, int n_layers, int seqs) {
    tkv_config cfg = make_f32_config(n_layers, seqs);
    int i;
    memset(layers, 0, (size_t)n_layers * sizeof *layers);
    for (i = 0; i + 1 < n_layers; i++) layers[i].no_cache = 1;
    cfg.layers = layers;
    return cfg;
}

/* The state of a layer after n tokens of text `id`. */
static void fill_state(unsigned char *bytes, int id, int layer, int n, size_t size) {
    tkv_rng rng =
        tkv_rng_seed(((uint64_t)(unsigned)id << 48) ^ ((uint64_t)(unsigned)layer << 32) ^ (unsigned)n);
    size_t i;
    for (i = 0; i < size; i++) bytes[i] = (unsigned char)(tkv_rng_u64(&rng) >> 56);
}

static tkv_status put_state(tkv_cache *kv, int seq, int layer, int id, int n, size_t size) {
    fill_state(bytes_in, id, layer, n, size);
    return tkv_seq_put_state(kv, seq, layer, n, bytes_in, size);
}

/* Puts the states of all stateful layers, and stops at an error. */
static tkv_status put_position(tkv_cache *kv, int seq, int id, int n, size_t size) {
    tkv_status st = TKV_OK;
    int layer;
    for (layer = 0; layer < STATEFUL && !st; layer++) st = put_state(kv, seq, layer, id, n, size);
    return st;
}

static void check_state(const tkv_cache *kv, int seq, int layer, int id, int n, size_t size) {
    size_t needed = 0;
    CHECK_EQ(tkv_seq_get_state(kv, seq, layer, n, NULL, 0, &needed), TKV_OK);
    CHECK_EQ(needed, size);
    memset(bytes_out, 0, size);
    CHECK_EQ(tkv_seq_get_state(kv, seq, layer, n, bytes_out, size, NULL), TKV_OK);
    fill_state(bytes_in, id, layer, n, size);
    CHECK_MEM(bytes_out, bytes_in, size);
}

static int n_positions(const tkv_cache *kv, int seq) {
    int n = -1;
    CHECK_EQ(tkv_seq_list_states(kv, seq, TKV_ALL_LAYERS, NULL, 0, &n), TKV_OK);
    return n;
}

/* Checks every state of a sequence, and that all stateful layers have the same positions. */
static void check_states(const tkv_cache *kv, int seq, int id, size_t size) {
    static int positions[2048], of_layer[2048];
    int n, n_of_layer, i, layer;
    CHECK_EQ(tkv_seq_list_states(kv, seq, TKV_ALL_LAYERS, positions, 2048, &n), TKV_OK);
    for (layer = 0; layer < STATEFUL; layer++) {
        CHECK_EQ(tkv_seq_list_states(kv, seq, layer, of_layer, 2048, &n_of_layer), TKV_OK);
        CHECK_EQ(n_of_layer, n);
        CHECK_MEM(of_layer, positions, (size_t)n * sizeof *positions);
        for (i = 0; i < n; i++) check_state(kv, seq, layer, id, positions[i], size);
    }
}

static size_t state_bytes_of(const tkv_cache *kv) {
    tkv_memory_info memory;
    CHECK_EQ(tkv_get_memory(kv, &memory), TKV_OK);
    return memory.states;
}

static size_t total_of(const tkv_cache *kv) {
    tkv_memory_info memory;
    CHECK_EQ(tkv_get_memory(kv, &memory), TKV_OK);
    return memory.total;
}

/* Bytes that the cache counts for a state: 64 for its name, and whole lines of 64. */
static size_t counted(size_t size) { return 64 + (size + 63) / 64 * 64; }

/* >>put and get */
TEST(states_come_back) {
    static const size_t sizes[] = {1, 63, 64, 65, 1000, MOST_BYTES};
    tkv_layer_config layers[LAYERS];
    tkv_config cfg = make_hybrid_config(layers, LAYERS, 2);
    tkv_cache *kv = create_cache(&cfg);
    size_t needed = 7, sum = 0;
    int i, n = -1, list[8];
    for (i = 0; i < COUNT(sizes); i++) {
        CHECK_EQ(put_state(kv, 0, i % LAYERS, 1, 100 + 10 * i, sizes[i]), TKV_OK);
        sum += counted(sizes[i]);
        CHECK_EQ(state_bytes_of(kv), sum);
        check_cache_at(kv, "state", i);
    }
    for (i = 0; i < COUNT(sizes); i++) check_state(kv, 0, i % LAYERS, 1, 100 + 10 * i, sizes[i]);
    CHECK_EQ(tkv_seq_get_state(kv, 0, 0, 101, bytes_out, MOST_BYTES, &needed), TKV_ERR_RANGE);
    CHECK_EQ(tkv_seq_get_state(kv, 1, 0, 100, bytes_out, MOST_BYTES, &needed), TKV_ERR_RANGE);
    CHECK_EQ(tkv_seq_get_state(kv, 0, 1, 100, bytes_out, MOST_BYTES, &needed), TKV_ERR_RANGE);
    CHECK_EQ(needed, 7);
    CHECK_EQ(tkv_seq_get_state(kv, 0, 3, 130, bytes_out, 64, &needed), TKV_ERR_CAPACITY);
    CHECK_EQ(needed, 65);
    CHECK_EQ(put_state(kv, 0, 0, 2, 100, 1), TKV_OK); /* the same name: it takes the place of the old one */
    check_state(kv, 0, 0, 2, 100, 1);
    CHECK_EQ(state_bytes_of(kv), sum);
    CHECK_EQ(put_state(kv, 0, 0, 3, 100, 300), TKV_OK);
    check_state(kv, 0, 0, 3, 100, 300);
    CHECK_EQ(state_bytes_of(kv), sum + counted(300) - counted(1));
    CHECK_EQ(tkv_seq_list_states(kv, 0, 0, list, 8, &n), TKV_OK);
    CHECK_EQ(n, 2);
    CHECK(list[0] == 100 && list[1] == 140);
    CHECK_EQ(tkv_seq_list_states(kv, 0, 0, list, 1, &n), TKV_OK); /* too short: the number is that of all */
    CHECK_EQ(n, 2);
    CHECK_EQ(tkv_seq_reset(kv, 0), TKV_OK);
    CHECK_EQ(state_bytes_of(kv), 0);
    check_cache_at(kv, "after a reset", 0);
    tkv_destroy(kv);
}

TEST(reports_know_states) {
    static char text[16384];
    char want[80];
    tkv_layer_config layers[LAYERS];
    tkv_config cfg = make_hybrid_config(layers, LAYERS, 1);
    tkv_cache *kv;
    cfg.limits.max_states = 2;
    kv = create_cache(&cfg);
    CHECK_EQ(put_position(kv, 0, 1, 10, 700), TKV_OK);
    CHECK_EQ(put_position(kv, 0, 1, 20, 700), TKV_OK);
    CHECK_EQ(put_position(kv, 0, 1, 30, 700), TKV_OK);
    sprintf(want, "\"states\": %d", 2 * STATEFUL * (64 + 704));
    CHECK_EQ(tkv_print_report(kv, TKV_REPORT_JSON, NULL, text, sizeof text, NULL), TKV_OK);
    CHECK(strstr(text, want) != NULL);
    CHECK(strstr(text, "\"thinned\": 3") != NULL);
    sprintf(want, "tkv_memory_bytes{part=\"states\"} %d\n", 2 * STATEFUL * (64 + 704));
    CHECK_EQ(tkv_print_report(kv, TKV_REPORT_PROMETHEUS, NULL, text, sizeof text, NULL), TKV_OK);
    CHECK(strstr(text, want) != NULL);
    CHECK(strstr(text, "\ntkv_states_thinned_total 3\n") != NULL);
    tkv_destroy(kv);
}

/* A position counts only if every stateful layer has it, in every sequence of the cache. */
TEST(a_position_is_found_when_all_layers_have_it) {
    tkv_layer_config layers[LAYERS];
    tkv_config cfg = make_hybrid_config(layers, LAYERS, 2);
    tkv_cache *kv = create_cache(&cfg);
    CHECK_EQ(append_to_all_layers(kv, 0, 1, 300, 100), TKV_OK);
    CHECK_EQ(append_to_all_layers(kv, 1, 1, 300, 100), TKV_OK);
    CHECK_EQ(tkv_seq_find_state(kv, 0, 200), 200); /* no layer is stateful yet */
    CHECK_EQ(tkv_seq_find_state(kv, 0, 500), 300);
    CHECK_EQ(tkv_seq_find_state(kv, 0, TKV_UNLIMITED), 300);
    CHECK_EQ(put_state(kv, 0, 0, 1, 128, 100), TKV_OK);
    CHECK_EQ(tkv_seq_find_state(kv, 0, 200), 128);
    CHECK_EQ(tkv_seq_find_state(kv, 0, 127), 0);
    CHECK_EQ(tkv_seq_find_state(kv, 1, 200), 0); /* layer 0 is stateful, and sequence 1 has no state */
    CHECK_EQ(put_state(kv, 0, 1, 1, 192, 100), TKV_OK);
    CHECK_EQ(tkv_seq_find_state(kv, 0, 300), 0); /* layer 1 has none at 128, layer 0 none at 192 */
    CHECK_EQ(put_state(kv, 0, 1, 1, 128, 100), TKV_OK);
    CHECK_EQ(tkv_seq_find_state(kv, 0, 300), 128);
    CHECK_EQ(put_state(kv, 0, 0, 1, 192, 100), TKV_OK);
    CHECK_EQ(tkv_seq_find_state(kv, 0, 300), 192);
    CHECK_EQ(tkv_seq_find_state(kv, 0, 192), 192);
    CHECK_EQ(tkv_seq_find_state(kv, 0, 191), 128);
    CHECK_EQ(tkv_seq_find_state(kv, 0, TKV_UNLIMITED), 192);
    CHECK_EQ(tkv_seq_find_state(kv, 0, -7), 0);
    CHECK_EQ(tkv_seq_find_state(kv, 2, 100), 0);
    CHECK_EQ(put_state(kv, 1, 0, 1, 64, 100), TKV_OK);
    CHECK_EQ(put_state(kv, 1, 1, 1, 64, 100), TKV_OK);
    CHECK_EQ(put_state(kv, 1, 0, 1, 128, 100), TKV_OK);
    CHECK_EQ(put_state(kv, 1, 1, 1, 129, 100), TKV_OK);
    CHECK_EQ(tkv_seq_find_state(kv, 1, 200), 64);
    CHECK_EQ(put_state(kv, 0, 2, 1, 128, 100), TKV_OK); /* now it is not complete any more */
    CHECK_EQ(tkv_seq_find_state(kv, 1, 200), 0);
    CHECK_EQ(tkv_seq_find_state(kv, 0, 200), 128);
    check_cache_at(kv, "a third stateful layer", 0);
    CHECK_EQ(tkv_seq_reset(kv, 1), TKV_OK);
    CHECK_EQ(tkv_seq_truncate(kv, 0, 100), TKV_OK); /* no state is left, but the layers stay stateful */
    CHECK_EQ(tkv_seq_find_state(kv, 0, 100), 0);
    CHECK_EQ(state_bytes_of(kv), 0);
    check_cache_at(kv, "cut", 100);
    tkv_destroy(kv);
}

TEST(states_are_refused_with_a_reason) {
    tkv_layer_config layers[LAYERS];
    tkv_config cfg = make_hybrid_config(layers, LAYERS, 2);
    tkv_cache *kv;
    char reason[200];
    size_t bytes;
    int n;
    cfg.limits.max_tokens = 1000;
    cfg.limits.state_bytes = 1000;
    kv = create_cache(&cfg);
    CHECK_EQ(tkv_seq_put_state(kv, 2, 0, 10, bytes_in, 10), TKV_ERR_ARG);
    CHECK_EQ(tkv_seq_put_state(kv, 0, LAYERS, 10, bytes_in, 10), TKV_ERR_ARG);
    CHECK_STR(tkv_get_last_error(kv), "there is no layer 4");
    CHECK_EQ(tkv_seq_put_state(kv, 0, 0, 0, bytes_in, 10), TKV_ERR_ARG);
    CHECK_STR(tkv_get_last_error(kv), "n_tokens is 0; a state has seen at least one token");
    CHECK_EQ(tkv_seq_put_state(kv, 0, 0, 1001, bytes_in, 10), TKV_ERR_CAPACITY);
    CHECK_STR(tkv_get_last_error(kv), "n_tokens is 1001, more than max_tokens");
    CHECK_EQ(tkv_seq_put_state(kv, 0, 0, 10, NULL, 10), TKV_ERR_ARG);
    CHECK_EQ(tkv_seq_put_state(kv, 0, 0, 10, bytes_in, 0), TKV_ERR_ARG);
    CHECK_STR(tkv_get_last_error(kv), "the bytes of the state are missing");
    CHECK_EQ(tkv_seq_put_state(kv, 0, 0, 10, bytes_in, (size_t)-1), TKV_ERR_CAPACITY);
    CHECK_EQ(tkv_seq_put_state(kv, 0, 0, 10, bytes_in, (size_t)-1 / 2), TKV_ERR_CAPACITY);
    CHECK_EQ(put_state(kv, 0, 0, 1, 10, 600), TKV_OK);
    CHECK_EQ(put_state(kv, 0, 1, 1, 10, 600), TKV_ERR_CAPACITY);
    CHECK_STR(tkv_get_last_error(kv),
              "a state of 704 bytes does not fit into limits.state_bytes beside the newest ones, "
              "which take 704");
    CHECK_EQ(put_state(kv, 0, 0, 1, 5, 600),
             TKV_ERR_CAPACITY); /* a newer state does not go for an older one */
    check_state(kv, 0, 0, 1, 10, 600);
    CHECK_EQ(tkv_seq_find_state(kv, 0, 100), 10); /* layer 1 did not become stateful */
    CHECK_EQ(tkv_seq_get_state(kv, 0, 0, 0, NULL, 0, NULL), TKV_ERR_ARG);
    CHECK_EQ(tkv_seq_list_states(kv, 0, 0, NULL, 1, NULL), TKV_ERR_ARG);
    CHECK_EQ(tkv_seq_list_states(kv, 0, 0, NULL, 1, &n), TKV_ERR_ARG);
    check_cache_at(kv, "after refusals", 0);
    tkv_destroy(kv);
    cfg.limits.max_states = -1;
    CHECK_EQ(tkv_validate_config(&cfg, reason, sizeof reason), TKV_ERR_CONFIG);
    CHECK_STR(reason, "limits.max_states is -1; it must be 1 to 65536, or 0 for 64");
    cfg.limits.max_states = 0;
    cfg.limits.state_bytes = cfg.budget.bytes = 1000000; /* in place: nothing is left for tokens */
    CHECK_EQ(tkv_get_required_bytes(&cfg, &bytes, NULL), TKV_ERR_BUDGET);
    CHECK_EQ(tkv_create_in_place(&cfg, bytes_in, sizeof bytes_in, &kv, reason, sizeof reason),
             TKV_ERR_BUDGET);
    CHECK_STR(reason,
              "budget.bytes has no room for limits.state_bytes, the index of limits.max_tokens, and pages");
    cfg.limits.state_bytes = (size_t)-1;
    cfg.budget.bytes = 0;
    CHECK_EQ(tkv_get_required_bytes(&cfg, &bytes, NULL), TKV_ERR_CONFIG);
}

/* >>fork and cut */
TEST(forks_share_states) {
    tkv_layer_config layers[LAYERS];
    tkv_config cfg = make_hybrid_config(layers, LAYERS, 4);
    tkv_cache *kv = create_cache(&cfg);
    const size_t size = 5000;
    int n;
    for (n = STEP; n <= 6 * STEP; n += STEP) {
        CHECK_EQ(append_to_all_layers(kv, 0, 1, STEP, STEP), TKV_OK);
        CHECK_EQ(put_position(kv, 0, 1, n, size), TKV_OK);
    }
    CHECK_EQ(put_position(kv, 2, 9, 77, size), TKV_OK); /* the fork replaces it */
    CHECK_EQ(state_bytes_of(kv), 7 * STATEFUL * counted(size));
    CHECK_EQ(tkv_seq_fork(kv, 0, 1, TKV_UNLIMITED), TKV_OK);
    CHECK_EQ(tkv_seq_fork(kv, 0, 2, 4 * STEP + 10), TKV_OK);
    CHECK_EQ(tkv_seq_fork(kv, 1, 3, STEP - 1), TKV_OK);
    CHECK_EQ(state_bytes_of(kv), 6 * STATEFUL * counted(size));
    check_cache_at(kv, "forked", 0);
    CHECK_EQ(tkv_seq_find_state(kv, 1, TKV_UNLIMITED), 6 * STEP);
    CHECK_EQ(tkv_seq_find_state(kv, 2, TKV_UNLIMITED), 4 * STEP);
    CHECK_EQ(tkv_seq_find_state(kv, 3, TKV_UNLIMITED), 0);
    check_states(kv, 1, 1, size);
    check_states(kv, 2, 1, size);
    CHECK_EQ(put_state(kv, 1, 0, 5, 2 * STEP, size), TKV_OK); /* sequence 1 alone gets another one there */
    check_state(kv, 1, 0, 5, 2 * STEP, size);
    check_state(kv, 0, 0, 1, 2 * STEP, size);
    check_state(kv, 2, 0, 1, 2 * STEP, size);
    CHECK_EQ(state_bytes_of(kv), (6 * STATEFUL + 1) * counted(size));
    CHECK_EQ(tkv_seq_truncate(kv, 0, 3 * STEP - 1), TKV_OK);
    CHECK_EQ(n_positions(kv, 0), 2);
    check_states(kv, 2, 1, size);
    check_cache_at(kv, "the source was cut", 0);
    CHECK_EQ(tkv_seq_reset(kv, 0), TKV_OK);
    CHECK_EQ(tkv_seq_reset(kv, 1), TKV_OK);
    CHECK_EQ(state_bytes_of(kv), 4 * STATEFUL * counted(size));
    check_states(kv, 2, 1, size);
    check_cache_at(kv, "one holder is left", 0);
    CHECK_EQ(tkv_seq_reset(kv, 2), TKV_OK);
    CHECK_EQ(state_bytes_of(kv), 0);
    tkv_destroy(kv);
}

/* A state that two sequences hold belongs to neither alone: what one of them puts there, the other one does not see. Each
 * holder may be the one that puts. */
TEST(two_holders_see_their_own_states) {
    tkv_layer_config layers[LAYERS];
    tkv_config cfg = make_hybrid_config(layers, LAYERS, 2);
    const int order[2] = {0, 0};
    const size_t size = 5000;
    int writer, by_reorder;
    for (by_reorder = 0; by_reorder < 2; by_reorder++)
        for (writer = 0; writer < 2; writer++) {
            tkv_cache *kv = create_cache(&cfg);
            CHECK_EQ(append_to_all_layers(kv, 0, 1, 2 * STEP, STEP), TKV_OK);
            CHECK_EQ(put_position(kv, 0, 1, STEP, size), TKV_OK);
            CHECK_EQ(put_position(kv, 0, 1, 2 * STEP, size), TKV_OK);
            if (by_reorder) CHECK_EQ(tkv_seq_reorder(kv, 0, order, 2), TKV_OK);
            else CHECK_EQ(tkv_seq_fork(kv, 0, 1, TKV_UNLIMITED), TKV_OK);
            CHECK_EQ(state_bytes_of(kv), 2 * STATEFUL * counted(size));
            CHECK_EQ(put_state(kv, writer, 1, 5, STEP, size), TKV_OK);     /* the same bytes */
            CHECK_EQ(put_state(kv, writer, 2, 5, STEP, size - 1), TKV_OK); /* as many lines */
            CHECK_EQ(state_bytes_of(kv), (2 * STATEFUL + 2) * counted(size));
            check_state(kv, writer, 1, 5, STEP, size);
            check_state(kv, writer, 2, 5, STEP, size - 1);
            check_states(kv, !writer, 1, size);
            CHECK_EQ(put_state(kv, !writer, 1, 6, STEP, size), TKV_OK); /* now each is held once */
            CHECK_EQ(state_bytes_of(kv), (2 * STATEFUL + 2) * counted(size));
            check_state(kv, writer, 1, 5, STEP, size);
            check_state(kv, !writer, 1, 6, STEP, size);
            check_cache_at(kv, "two holders", writer);
            tkv_destroy(kv);
        }
}

/* Where nothing more fits, a new state takes the memory of an older one only if no other sequence holds that one. */
TEST(no_state_of_two_holders_is_taken_over) {
    tkv_layer_config layers[LAYERS];
    tkv_config cfg = make_hybrid_config(layers, LAYERS, 2);
    const size_t size = 1000;
    tkv_cache *kv;
    cfg.limits.state_bytes = STATEFUL * counted(size);
    kv = create_cache(&cfg);
    CHECK_EQ(append_to_all_layers(kv, 0, 1, STEP, STEP), TKV_OK);
    CHECK_EQ(put_position(kv, 0, 1, STEP, size), TKV_OK);
    CHECK_EQ(tkv_seq_fork(kv, 0, 1, TKV_UNLIMITED), TKV_OK);
    CHECK_EQ(put_state(kv, 1, 0, 2, 2 * STEP, size), TKV_ERR_CAPACITY);
    CHECK_EQ(put_state(kv, 0, 0, 2, 2 * STEP, size), TKV_ERR_CAPACITY);
    check_states(kv, 0, 1, size);
    check_states(kv, 1, 1, size);
    check_cache_at(kv, "refused", 0);
    CHECK_EQ(tkv_seq_reset(kv, 0), TKV_OK);
    CHECK_EQ(put_position(kv, 1, 2, 2 * STEP, size), TKV_OK);
    CHECK_EQ(tkv_seq_find_state(kv, 1, TKV_UNLIMITED), 2 * STEP);
    check_states(kv, 1, 2, size);
    check_cache_at(kv, "taken over", 0);
    tkv_destroy(kv);
}

/* A fork has the state after its last token, as a cut to that length does; one token less, and it does not. */
TEST(forks_and_cuts_keep_the_state_at_their_end) {
    tkv_layer_config layers[LAYERS];
    tkv_config cfg = make_hybrid_config(layers, LAYERS, 2);
    tkv_cache *kv = create_cache(&cfg);
    int n, cut;
    CHECK_EQ(append_to_all_layers(kv, 0, 1, 4 * STEP, STEP), TKV_OK);
    for (n = STEP; n <= 4 * STEP; n += STEP) CHECK_EQ(put_position(kv, 0, 1, n, 500), TKV_OK);
    for (cut = 0; cut < 2; cut++)
        for (n = 4 * STEP; n >= STEP; n -= STEP) {
            CHECK_EQ(tkv_seq_fork(kv, 0, 1, n - !cut), TKV_OK);
            CHECK_EQ(tkv_seq_find_state(kv, 1, TKV_UNLIMITED), cut ? n : n - STEP);
            check_states(kv, 1, 1, 500);
            CHECK_EQ(tkv_seq_fork(kv, 0, 1, TKV_UNLIMITED), TKV_OK);
            CHECK_EQ(tkv_seq_truncate(kv, 1, n - !cut), TKV_OK);
            CHECK_EQ(tkv_seq_find_state(kv, 1, TKV_UNLIMITED), cut ? n : n - STEP);
            check_states(kv, 1, 1, 500);
            check_cache_at(kv, "fork", n);
        }
    tkv_destroy(kv);
}

TEST(cuts_take_the_states_behind_them) {
    tkv_layer_config layers[LAYERS];
    tkv_config cfg = make_hybrid_config(layers, LAYERS, 2);
    tkv_cache *kv;
    size_t fresh;
    int n;
    cfg.model.rope.dim = DIM;
    kv = create_cache(&cfg);
    fresh = total_of(kv);
    for (n = STEP; n <= 10 * STEP; n += STEP) {
        CHECK_EQ(append_to_all_layers(kv, 0, 1, STEP, STEP), TKV_OK);
        CHECK_EQ(put_position(kv, 0, 1, n, 500), TKV_OK);
    }
    CHECK_EQ(tkv_seq_begin(kv, 0), TKV_OK); /* a step that is aborted */
    CHECK_EQ(put_position(kv, 0, 1, 11 * STEP, 500), TKV_OK);
    CHECK_EQ(append_to_all_layers(kv, 0, 1, STEP, STEP), TKV_OK);
    CHECK_EQ(tkv_seq_find_state(kv, 0, TKV_UNLIMITED), 11 * STEP);
    CHECK_EQ(tkv_seq_abort(kv, 0), TKV_OK);
    CHECK_EQ(tkv_seq_find_state(kv, 0, TKV_UNLIMITED), 10 * STEP);
    CHECK_EQ(tkv_seq_truncate(kv, 0, 9 * STEP), TKV_OK);
    CHECK_EQ(tkv_seq_find_state(kv, 0, TKV_UNLIMITED), 9 * STEP);
    CHECK_EQ(tkv_seq_truncate(kv, 0, 9 * STEP - 1), TKV_OK);
    CHECK_EQ(tkv_seq_find_state(kv, 0, TKV_UNLIMITED), 8 * STEP);
    CHECK_EQ(tkv_seq_shift(kv, 0, 100, TKV_UNLIMITED, 50), TKV_OK); /* the order is the same */
    CHECK_EQ(tkv_seq_find_state(kv, 0, TKV_UNLIMITED), 8 * STEP);
    CHECK_EQ(tkv_seq_shift(kv, 0, 150, TKV_UNLIMITED, -50), TKV_OK);
    CHECK_EQ(tkv_seq_remove(kv, 0, 7 * STEP, 7 * STEP + 5), TKV_OK); /* the state at 8 * STEP has seen them */
    CHECK_EQ(tkv_seq_find_state(kv, 0, TKV_UNLIMITED), 7 * STEP);
    CHECK_EQ(tkv_seq_remove(kv, 0, 7 * STEP, 7 * STEP + 5), TKV_OK); /* they are gone already */
    CHECK_EQ(tkv_seq_remove(kv, 0, 5 * STEP - 1, 5 * STEP + 5), TKV_OK);
    CHECK_EQ(tkv_seq_find_state(kv, 0, TKV_UNLIMITED), 4 * STEP);
    CHECK_EQ(tkv_seq_remove(kv, 0, 3 * STEP + 1, TKV_UNLIMITED), TKV_OK);
    CHECK_EQ(tkv_get_length(kv, 0, TKV_ALL_LAYERS), 3 * STEP + 1);
    CHECK_EQ(tkv_seq_find_state(kv, 0, TKV_UNLIMITED), 3 * STEP);
    check_states(kv, 0, 1, 500);
    check_cache_at(kv, "cut", 3);
    CHECK_EQ(tkv_seq_truncate(kv, 0, 0), TKV_OK);
    CHECK_EQ(n_positions(kv, 0), 0);
    CHECK_EQ(total_of(kv), fresh); /* the list of states is given back too */
    tkv_destroy(kv);
}

/* >>thinning */
/* Checks that going back from any length by d tokens computes at most `share` * d + step of them again. */
static void check_ways_back(const tkv_cache *kv, int seq, int len, int step, double share) {
    static int at[65536];
    double worst = 0.0;
    int n, i;
    CHECK_EQ(tkv_seq_list_states(kv, seq, TKV_ALL_LAYERS, at, 65536, &n), TKV_OK);
    REQUIRE(n > 0);
    CHECK_EQ(at[n - 1], len);
    for (i = 0; i < n; i++) { /* the worst length to go back to is just before a position */
        const int back = len - (at[i] - 1), again = at[i] - 1 - (i ? at[i - 1] : 0);
        const double part = (double)(again - step) / back;
        if (part > worst) worst = part;
    }
    CHECK_LE(worst, share);
}

/* A state can be put before its tokens. Others that come in their place, and a removal of all from there on, take it. */
TEST(states_ahead_of_their_tokens) {
    tkv_layer_config layers[LAYERS];
    tkv_config cfg = make_hybrid_config(layers, LAYERS, 2);
    tkv_cache *kv = create_cache(&cfg);
    int i;
    CHECK_EQ(append_to_all_layers(kv, 0, 1, 20, 20), TKV_OK);
    for (i = 0; i < 3; i++) {
        CHECK_EQ(append_to_all_layers(kv, 1, 1, 10, 10), TKV_OK);
        CHECK_EQ(put_position(kv, 1, 1, 5, 100), TKV_OK);
        CHECK_EQ(put_position(kv, 1, 1, 15, 100), TKV_OK);
        CHECK_EQ(tkv_seq_find_state(kv, 1, TKV_UNLIMITED), 15);
        CHECK_EQ(i == 0   ? tkv_seq_copy(kv, 0, 10, 20, 1, 10)
                 : i == 1 ? tkv_seq_remove(kv, 1, 10, TKV_UNLIMITED)
                          : tkv_seq_remove(kv, 1, 10, 14),
                 TKV_OK);
        CHECK_EQ(tkv_seq_find_state(kv, 1, TKV_UNLIMITED), 5);
        check_cache_at(kv, "ahead", i);
        CHECK_EQ(tkv_seq_reset(kv, 1), TKV_OK);
    }
    tkv_destroy(kv);
}

/* A long text, and few positions: the distances from its end grow like powers. All layers have the same ones. */
TEST(positions_are_log_spaced) {
    static const int most[] = {4, 8, 16, 64};
    static const double share[] = {30.0, 4.0, 1.1, 0.2}; /* equal ratios: 9, 1.7, 0.6, 0.1 */
    static int at[64], before[64];
    int m, n, i, k, n_now, n_before = 0, lost;
    for (m = 0; m < COUNT(most); m++) {
        tkv_layer_config layers[LAYERS];
        tkv_config cfg = make_hybrid_config(layers, LAYERS, 1);
        tkv_cache *kv;
        cfg.limits.max_states = most[m];
        kv = create_cache(&cfg);
        for (n = STEP; n <= 1000 * STEP; n += STEP) {
            CHECK_EQ(put_position(kv, 0, 1, n, 8), TKV_OK);
            CHECK_EQ(tkv_seq_find_state(kv, 0, TKV_UNLIMITED), n);
            CHECK_EQ(tkv_seq_list_states(kv, 0, TKV_ALL_LAYERS, at, 64, &n_now), TKV_OK);
            CHECK_EQ(n_now, n / STEP < most[m] ? n / STEP : most[m]);
            for (i = k = lost = 0; i < n_before && n > STEP;
                 i++) { /* one position goes for each that comes */
                while (k < n_now && at[k] < before[i]) k++;
                lost += k == n_now || at[k] != before[i];
            }
            CHECK_LE(lost, 1);
            memcpy(before, at, sizeof at);
            n_before = n_now;
            if (n % (50 * STEP) == 0 && n / STEP > 4 * most[m]) check_ways_back(kv, 0, n, STEP, share[m]);
        }
        check_states(kv, 0, 1, 8);
        check_cache_at(kv, "positions", most[m]);
        CHECK(budget_of(kv).thinned == (uint64_t)((1000 - most[m]) * STATEFUL));
        n_before = 0;
        tkv_destroy(kv);
    }
}

/* A prompt layer by layer: each later layer ends with the positions that the first one kept. */
TEST(layers_that_put_one_after_the_other_keep_the_same_positions) {
    tkv_layer_config layers[LAYERS];
    tkv_config cfg = make_hybrid_config(layers, LAYERS, 1);
    tkv_cache *kv;
    int layer, n;
    cfg.limits.max_states = 12;
    kv = create_cache(&cfg);
    for (layer = 0; layer < STATEFUL; layer++)
        for (n = STEP; n <= 300 * STEP; n += STEP) {
            CHECK_EQ(put_state(kv, 0, layer, 1, n, 100), TKV_OK);
            CHECK_LE(state_bytes_of(kv), 14 * STATEFUL * counted(100));
            if (n % (100 * STEP) == 0) check_cache_at(kv, "layer", layer);
        }
    CHECK_EQ(n_positions(kv, 0), 12);
    check_states(kv, 0, 1, 100);
    check_ways_back(kv, 0, 300 * STEP, STEP, 1.5);
    tkv_destroy(kv);
}

/* limits.state_bytes without a budget: it holds over all sequences, and each keeps its newest position. */
TEST(states_have_a_limit_of_their_own) {
    tkv_layer_config layers[LAYERS];
    tkv_config cfg = make_hybrid_config(layers, LAYERS, 3);
    const size_t position = STATEFUL * counted(1000);
    tkv_cache *kv;
    int n, seq;
    cfg.limits.state_bytes = 10 * position + 1;
    kv = create_cache(&cfg);
    for (n = 1; n <= 40; n++)
        for (seq = 0; seq < 3; seq++) {
            CHECK_EQ(put_position(kv, seq, seq, n * STEP, 1000), TKV_OK);
            CHECK_LE(state_bytes_of(kv), cfg.limits.state_bytes);
            CHECK_EQ(tkv_seq_find_state(kv, seq, TKV_UNLIMITED), n * STEP);
        }
    CHECK_EQ(n_positions(kv, 0) + n_positions(kv, 1) + n_positions(kv, 2), 10);
    for (seq = 0; seq < 3; seq++) check_states(kv, seq, seq, 1000);
    CHECK_EQ(tkv_seq_fork(kv, 0, 1, TKV_UNLIMITED), TKV_OK);
    check_cache_at(kv, "limit", 10);
    tkv_destroy(kv);
}

/* >>budgets */
/* Shared positions are thinned in all sequences together, or they would free nothing. */
TEST(shared_positions_go_together) {
    tkv_layer_config layers[LAYERS];
    tkv_config cfg = make_hybrid_config(layers, LAYERS, 5);
    const size_t position = STATEFUL * counted(2000);
    tkv_cache *kv;
    int n, seq;
    cfg.limits.state_bytes = 20 * position;
    kv = create_cache(&cfg);
    for (n = 1; n <= 15; n++) CHECK_EQ(put_position(kv, 0, 1, n * STEP, 2000), TKV_OK);
    for (seq = 1; seq < 5; seq++) CHECK_EQ(tkv_seq_fork(kv, 0, seq, TKV_UNLIMITED), TKV_OK);
    for (seq = 0; seq < 5; seq++)
        for (n = 16; n <= 18; n++) CHECK_EQ(put_position(kv, seq, 1, n * STEP, 2000), TKV_OK);
    CHECK_LE(state_bytes_of(kv), cfg.limits.state_bytes);
    for (seq = 0; seq < 5; seq++) CHECK_EQ(n_positions(kv, seq), 5 + 3); /* 5 shared ones, and 15 others */
    for (seq = 0; seq < 5; seq++) check_states(kv, seq, 1, 2000);
    check_cache_at(kv, "shared", 0);
    tkv_destroy(kv);
}

/* A thinned position counts once, whether one sequence held it, two, or three. All holders lose it together. */
TEST(a_shared_position_is_thinned_once) {
    int n_forks, n, seq;
    for (n_forks = 0; n_forks <= 2; n_forks++) {
        tkv_layer_config layers[LAYERS];
        tkv_config cfg = make_hybrid_config(layers, LAYERS, 3);
        tkv_cache *kv;
        cfg.limits.state_bytes = 10 * STATEFUL * counted(2000);
        kv = create_cache(&cfg);
        for (n = 1; n <= 10; n++) CHECK_EQ(put_position(kv, 0, 1, n * STEP, 2000), TKV_OK);
        CHECK_EQ(budget_of(kv).thinned, 0);
        for (seq = 1; seq <= n_forks; seq++) CHECK_EQ(tkv_seq_fork(kv, 0, seq, TKV_UNLIMITED), TKV_OK);
        for (n = 11; n <= 13; n++) CHECK_EQ(put_position(kv, n_forks, 1, n * STEP, 2000), TKV_OK);
        CHECK_EQ(budget_of(kv).thinned, 3 * STATEFUL);
        CHECK_EQ(n_positions(kv, n_forks), 10);
        for (seq = 0; seq < n_forks; seq++) CHECK_EQ(n_positions(kv, seq), 7);
        for (seq = 0; seq <= n_forks; seq++) check_states(kv, seq, 1, 2000);
        check_cache_at(kv, "forks", n_forks);
        tkv_destroy(kv);
    }
}

/* A budget holds to the byte. States go before a token is coded again, all but a few; and all spare ones before a token
 * is evicted. */
TEST(states_go_before_tokens) {
    enum { SIZE = 20000, TEXT = 6000 };
    tkv_layer_config layers[LAYERS];
    tkv_config cfg = make_hybrid_config(layers, LAYERS, 2);
    const size_t position = STATEFUL * counted(SIZE);
    counting_allocator p;
    tkv_cache *kv;
    int n = 0, n_recoding = -1, n_evicting = -1, most = 0, refused = 0;
    cfg.tiers.hot = pair_of(TKV_F16, TKV_F16);
    cfg.tiers.warm = cfg.tiers.archive = pair_of(TKV_KIVI2, TKV_KIVI2);
    cfg.evict.policy = TKV_EVICT_SLIDING;
    cfg.host.allocator = counting_allocator_of(&p);
    cfg.budget.bytes = 24 * position;
    kv = create_cache(&cfg);
    CHECK_EQ(append_to_all_layers(kv, 1, 5, 300, 64), TKV_OK);
    CHECK_EQ(put_position(kv, 1, 5, 300, SIZE), TKV_OK);
    while (n_evicting < 0 && n < 40 * TEXT) {
        tkv_budget_info budget;
        REQUIRE(append_to_all_layers(kv, 0, 1, STEP, STEP) == TKV_OK);
        n += STEP;
        budget = budget_of(kv);
        if (n_recoding < 0 && budget.demoted) n_recoding = n_positions(kv, 0);
        if (n_evicting < 0 && budget.evicted) n_evicting = n_positions(kv, 0);
        CHECK_LE(p.held, cfg.budget.bytes);
        CHECK_EQ(p.held, total_of(kv));
        if (n <= TEXT) CHECK_EQ(put_position(kv, 0, 1, n, SIZE), TKV_OK);
        CHECK_LE(p.held, cfg.budget.bytes);
        CHECK_EQ(p.held, total_of(kv));
        if (n_positions(kv, 0) > most) most = n_positions(kv, 0);
        refused += (int)budget.refused;
    }
    CHECK_LE(15, most);
    CHECK_EQ(n_recoding, 8); /* an eighth of 64 */
    CHECK_EQ(n_evicting, 1);
    CHECK_EQ(n_positions(kv, 1), 1);
    CHECK_EQ(refused, 0);
    check_states(kv, 0, 1, SIZE);
    check_states(kv, 1, 5, SIZE);
    check_cache_at(kv, "evicting", n);
    /* The budget is full of tokens. New states take the memory of old ones, and no token goes for them. */
    {
        const uint64_t evicted = budget_of(kv).evicted;
        const size_t held = state_bytes_of(kv);
        int i;
        CHECK_EQ(tkv_set_budget(kv, budget_of(kv).used), TKV_OK); /* the pages that eviction freed */
        CHECK_EQ(budget_of(kv).evicted, evicted);
        for (i = 1; i <= 3; i++) {
            CHECK_EQ(put_position(kv, 0, 1, TEXT + i * STEP, SIZE), TKV_OK);
            CHECK_EQ(tkv_seq_find_state(kv, 0, TKV_UNLIMITED), TEXT + i * STEP);
            CHECK_EQ(n_positions(kv, 0), 1);
        }
        CHECK_EQ(budget_of(kv).evicted, evicted);
        CHECK_EQ(state_bytes_of(kv), held);
        check_states(kv, 0, 1, SIZE);
        CHECK_EQ(put_state(kv, 0, 0, 1, TEXT + 4 * STEP, SIZE + 1000),
                 TKV_ERR_BUDGET);                                                /* it has other bytes */
        CHECK_EQ(put_state(kv, 0, 3, 1, TEXT + 4 * STEP, SIZE), TKV_ERR_BUDGET); /* it has none so far */
        CHECK_EQ(tkv_seq_find_state(kv, 0, TKV_UNLIMITED), TEXT + 3 * STEP);
        check_states(kv, 0, 1, SIZE);
        CHECK_LE(p.peak, cfg.budget.bytes);
    }
    check_cache_at(kv, "taken over", n);
    CHECK_EQ(tkv_seq_reset(kv, 1), TKV_OK);
    CHECK_EQ(put_state(kv, 0, 3, 1, TEXT + 4 * STEP, 1000), TKV_OK);
    tkv_destroy(kv);
    CHECK_EQ(p.held, 0);
}

/* A lower budget thins states first; tokens stay exact. */
TEST(a_lower_budget_thins_states) {
    tkv_layer_config layers[LAYERS];
    tkv_config cfg = make_hybrid_config(layers, LAYERS, 1);
    const size_t position = STATEFUL * counted(10000);
    tkv_cache *kv;
    int n, before;
    cfg.tiers.hot = pair_of(TKV_F16, TKV_F16);
    cfg.tiers.warm = cfg.tiers.archive = pair_of(TKV_KIVI2, TKV_KIVI2);
    cfg.budget.bytes = 90 * position;
    kv = create_cache(&cfg);
    for (n = STEP; n <= 60 * STEP; n += STEP) {
        CHECK_EQ(append_to_all_layers(kv, 0, 1, STEP, STEP), TKV_OK);
        CHECK_EQ(put_position(kv, 0, 1, n, 10000), TKV_OK);
    }
    before = n_positions(kv, 0);
    CHECK_EQ(before, 60);
    CHECK_EQ(tkv_set_budget(kv, cfg.budget.bytes - 40 * position), TKV_OK);
    CHECK_LE(n_positions(kv, 0), 45);
    CHECK_LE(25, n_positions(kv, 0));
    CHECK_EQ(budget_of(kv).demoted, 0);
    CHECK_EQ(budget_of(kv).level, 0);
    check_ways_back(kv, 0, 60 * STEP, STEP, 0.6);
    check_states(kv, 0, 1, 10000);
    check_cache_at(kv, "lower budget", 0);
    CHECK_EQ(tkv_set_budget(kv, cfg.budget.bytes / 1000), TKV_ERR_BUDGET);
    check_states(kv, 0, 1, 10000);
    tkv_destroy(kv);
}

/* All bytes that are not used are good for a state, and not one more. */
TEST(a_state_fits_to_the_byte) {
    tkv_layer_config layers[LAYERS];
    tkv_config cfg = make_hybrid_config(layers, LAYERS, 1);
    const size_t list = 16 * 2 * sizeof(void *); /* the list of states begins with 16 */
    counting_allocator p;
    unsigned char *bytes = (unsigned char *)calloc(1, 400000);
    tkv_cache *kv;
    size_t room;
    if (!bytes) exit(2);
    cfg.host.allocator = counting_allocator_of(&p);
    cfg.budget.bytes = 400000;
    cfg.budget.pressure.max_level = TKV_OFF;
    kv = create_cache(&cfg);
    CHECK_EQ(append_to_all_layers(kv, 0, 1, 430, 100), TKV_OK);
    CHECK_EQ(tkv_seq_begin(kv, 0), TKV_OK);
    CHECK_EQ(append_to_all_layers(kv, 0, 1, 500, 500), TKV_OK);
    CHECK_EQ(tkv_seq_abort(kv, 0), TKV_OK); /* the cache keeps free pages */
    CHECK_LE(budget_of(kv).used + 1, p.held);
    room = (budget_of(kv).budget - budget_of(kv).used - list) / 64 * 64 - 64;
    CHECK_EQ(tkv_seq_put_state(kv, 0, 0, 400, bytes, room + 1), TKV_ERR_BUDGET);
    CHECK_LE(1, strlen(tkv_get_last_error(kv)));
    check_cache_at(kv, "a state of a byte more than fits", 0);
    CHECK_EQ(tkv_seq_put_state(kv, 0, 0, 400, bytes, room), TKV_OK);
    check_cache_at(kv, "a state that fits", 0);
    CHECK_LE(p.peak, cfg.budget.bytes);
    CHECK_LE(cfg.budget.bytes - 63, budget_of(kv).used);
    CHECK_EQ(append_to_all_layers(kv, 0, 1, 20, 10), TKV_OK); /* there is room in the last block */
    CHECK_EQ(append_to_all_layers(kv, 0, 1, 900, 10), TKV_ERR_BUDGET);
    check_cache_at(kv, "full", 0);
    tkv_destroy(kv);
    CHECK_EQ(p.held, 0);
    free(bytes);
}

/* A put that cannot fit even with all tokens coded is refused at once: no token pays for it. */
/* A fork shares states, but has a list of its own. Under a budget without room for it there is no fork. */
TEST(a_fork_needs_room_for_its_list_of_states) {
    tkv_layer_config layers[LAYERS];
    tkv_config cfg = make_hybrid_config(layers, LAYERS, 2);
    const size_t list = 16 * 2 * sizeof(void *);
    unsigned char *bytes = (unsigned char *)calloc(1, 400000);
    tkv_cache *kv;
    if (!bytes) exit(2);
    cfg.budget.bytes = 400000;
    cfg.budget.pressure.max_level = TKV_OFF;
    kv = create_cache(&cfg);
    CHECK_EQ(append_to_all_layers(kv, 0, 1, 100, 100), TKV_OK);
    CHECK_EQ(tkv_seq_put_state(kv, 0, 0, 100, bytes,
                               (budget_of(kv).budget - budget_of(kv).used - list) / 64 * 64 - 64),
             TKV_OK);
    CHECK_EQ(tkv_seq_fork(kv, 0, 1, TKV_UNLIMITED), TKV_ERR_BUDGET);
    CHECK_LE(1, strlen(tkv_get_last_error(kv)));
    CHECK_EQ(tkv_get_length(kv, 1, TKV_ALL_LAYERS), 0);
    check_cache_at(kv, "no room", 0);
    CHECK_EQ(tkv_set_budget(kv, 500000), TKV_OK);
    CHECK_EQ(tkv_seq_fork(kv, 0, 1, TKV_UNLIMITED), TKV_OK);
    CHECK_EQ(tkv_seq_find_state(kv, 1, TKV_UNLIMITED), 100);
    check_cache_at(kv, "forked", 0);
    tkv_destroy(kv);
    free(bytes);
}

TEST(a_refused_state_codes_no_token) {
    tkv_layer_config layers[LAYERS];
    tkv_config cfg = make_hybrid_config(layers, LAYERS, 1);
    const size_t size = 364000; /* 24,000 too many; the coded tokens take 48,000 */
    unsigned char *bytes = (unsigned char *)calloc(1, size);
    tkv_cache *kv;
    if (!bytes) exit(2);
    cfg.tiers.hot = pair_of(TKV_F16, TKV_F16);
    cfg.tiers.warm = cfg.tiers.archive = pair_of(TKV_KIVI2, TKV_KIVI2);
    cfg.evict.policy = TKV_EVICT_SLIDING; /* with all tokens evicted it would fit */
    cfg.budget.bytes = 500000;
    kv = create_cache(&cfg);
    CHECK_EQ(append_to_all_layers(kv, 0, 1, 2000, 100), TKV_OK);
    CHECK_EQ(budget_of(kv).demoted, 0);
    CHECK_EQ(tkv_seq_put_state(kv, 0, 0, 2000, bytes, size), TKV_ERR_BUDGET);
    CHECK_EQ(budget_of(kv).demoted, 0);
    CHECK_EQ(budget_of(kv).level, 0);
    CHECK_EQ(tkv_seq_put_state(kv, 0, 0, 2000, bytes, 300000),
             TKV_OK); /* this one fits beside coded tokens */
    CHECK_LE(1, budget_of(kv).demoted);
    CHECK_EQ(budget_of(kv).evicted, 0);
    check_cache_at(kv, "coded for a state", 0);
    tkv_destroy(kv);
    free(bytes);
}

/* >>failed allocations */
TEST(states_without_memory_change_nothing) {
    tkv_layer_config layers[LAYERS];
    counting_allocator p;
    int budgeted, fail_at, n, failed = 0;
    tkv_status st;
    for (budgeted = 0; budgeted < 2; budgeted++)
        for (fail_at = 1, st = TKV_ERR_NOMEM; st; fail_at++) {
            tkv_config cfg = make_hybrid_config(layers, LAYERS, 2);
            snapshot before;
            tkv_cache *kv;
            size_t held;
            cfg.host.allocator = counting_allocator_of(&p);
            cfg.budget.bytes = budgeted ? 4000000 : 0;
            kv = create_cache(&cfg);
            for (n = 1; n <= 5; n++) { /* 15 states and one more: the list has room for 16 */
                CHECK_EQ(append_to_all_layers(kv, 0, 1, STEP, STEP), TKV_OK);
                CHECK_EQ(put_position(kv, 0, 1, n * STEP, 3000), TKV_OK);
            }
            CHECK_EQ(put_state(kv, 0, 0, 1, 6 * STEP, 3000), TKV_OK);
            before = snapshot_of(kv);
            held = state_bytes_of(kv);
            p.fail_at = fail_at;
            st = put_state(kv, 0, 1, 1, 6 * STEP, 3000);
            if (!st) st = tkv_seq_fork(kv, 0, 1, 3 * STEP);
            p.fail_at = 0;
            failed += st != TKV_OK;
            if (st) {
                CHECK_EQ(st, TKV_ERR_NOMEM);
                CHECK(tkv_get_last_error(kv)[0] != 0);
                CHECK_EQ(tkv_seq_find_state(kv, 0, TKV_UNLIMITED), 5 * STEP);
                CHECK_EQ(tkv_seq_find_state(kv, 1, TKV_UNLIMITED), 0);
                CHECK_LE(state_bytes_of(kv), held + counted(3000));
                check_unchanged(kv, &before, "a failed put or fork");
            } else {
                free_snapshot(&before);
            }
            check_cache_at(kv, "allocation", fail_at);
            CHECK_EQ(put_position(kv, 0, 1, 6 * STEP, 3000), TKV_OK);
            CHECK_EQ(tkv_seq_fork(kv, 0, 1, 3 * STEP), TKV_OK);
            check_states(kv, 0, 1, 3000);
            check_states(kv, 1, 1, 3000);
            tkv_destroy(kv);
            CHECK_EQ(p.held, 0);
        }
    CHECK_LE(6, failed); /* the list, the state; and those of the fork, with and without a budget */
}

/* >>in place */
TEST(states_in_place) {
    tkv_layer_config layers[LAYERS];
    unsigned char traces[40][8];
    int budgeted, i, n, n_traces;
    for (budgeted = n_traces = 0; budgeted < 2; budgeted++, n_traces = 0) {
        tkv_config cfg = make_hybrid_config(layers, LAYERS, 2);
        const size_t position = STATEFUL * counted(900);
        size_t without = 0, with = 0;
        guarded_buffer buffer;
        tkv_cache *kv;
        cfg.limits.max_tokens = 1000;
        cfg.host.wipe_freed = 1;
        cfg.budget.bytes = budgeted ? 1200000 : 0;
        if (budgeted) cfg.evict.policy = TKV_EVICT_SLIDING;
        kv = create_cache_in_place(&cfg, &buffer, 0);
        CHECK_EQ(put_state(kv, 0, 0, 1, 10, 10), TKV_ERR_CAPACITY);
        CHECK_STR(tkv_get_last_error(kv),
                  "set limits.state_bytes: in place, states have memory of their own");
        CHECK_EQ(tkv_seq_fork(kv, 0, 1, 0), TKV_OK);
        tkv_destroy(kv);
        free(buffer.raw);
        cfg.limits.max_states = 8;
        CHECK_EQ(tkv_get_required_bytes(&cfg, &without, NULL), TKV_OK);
        cfg.limits.state_bytes = 5 * position;
        CHECK_EQ(tkv_get_required_bytes(&cfg, &with, NULL), TKV_OK);
        if (!budgeted) CHECK_LE(without + 5 * position, with);
        kv = create_cache_in_place(&cfg, &buffer, 24);
        for (n = 1; n <= 10; n++) {
            CHECK_EQ(append_to_all_layers(kv, 0, 1, STEP, STEP), TKV_OK);
            CHECK_EQ(put_position(kv, 0, 1, n * STEP, 900), TKV_OK);
            CHECK_LE(state_bytes_of(kv), cfg.limits.state_bytes);
            check_cache_at(kv, "in place", n);
        }
        CHECK_EQ(n_positions(kv, 0), 5);
        check_states(kv, 0, 1, 900);
        CHECK_EQ(tkv_seq_fork(kv, 0, 1, 9 * STEP + 1), TKV_OK);
        check_states(kv, 1, 1, 900);
        /* States of other sizes: the gaps between them are joined when that is needed. */
        for (i = 0; i < 40; i++) {
            const size_t size = (size_t)(1 + i * 137 % 900);
            CHECK_EQ(put_position(kv, 0, 1, 11 * STEP + 1 + i, size), TKV_OK);
            fill_state(bytes_in, 1, 0, 11 * STEP + 1 + i, size);
            if (size >= 16) memcpy(traces[n_traces++], bytes_in + size - 8, 8);
            check_cache_at(kv, "in place, other sizes", i);
        }
        CHECK_EQ(tkv_seq_find_state(kv, 0, TKV_UNLIMITED), 11 * STEP + 40);
        for (i = 0; i < STATEFUL; i++) check_state(kv, 0, i, 1, 11 * STEP + 40, (size_t)(1 + 39 * 137 % 900));
        CHECK_EQ(tkv_seq_reset(kv, 0), TKV_OK);
        check_states(kv, 1, 1, 900);
        CHECK_EQ(tkv_seq_reset(kv, 1), TKV_OK);
        CHECK_EQ(state_bytes_of(kv), 0);
        check_cache_at(kv, "in place, reset", 0);
        for (i = 0; i < n_traces; i++) { /* 8 bytes of each state are nowhere */
            size_t at = 0;
            while (at + 8 <= buffer.bytes && memcmp(buffer.mem + at, traces[i], 8)) at++;
            CHECK(at + 8 > buffer.bytes);
        }
        check_borders(&buffer);
        tkv_destroy(kv);
        free(buffer.raw);
    }
}

/* The last 8 bytes of a state are somewhere in memory. */
static int has_trace(const guarded_buffer *buffer, int id, int layer, size_t size) {
    size_t at = 0;
    fill_state(bytes_in, id, layer, 1, size);
    while (at + 8 <= buffer->bytes && memcmp(buffer->mem + at, bytes_in + size - 8, 8)) at++;
    return at + 8 <= buffer->bytes;
}

/* With wipe_freed no byte of a state stays: not of one that was replaced by a shorter one, nor of one that moved. */
TEST(freed_states_are_wiped) {
    tkv_layer_config layers[LAYERS];
    tkv_config cfg = make_hybrid_config(layers, LAYERS, 2);
    guarded_buffer buffer;
    tkv_cache *kv;
    int layer;
    cfg.limits.max_tokens = 100;
    cfg.limits.state_bytes = 4 * counted(448);
    cfg.host.wipe_freed = 1;
    kv = create_cache_in_place(&cfg, &buffer, 0);
    for (layer = 0; layer < 2; layer++) { /* they lie one behind the other */
        CHECK_EQ(put_state(kv, 0, layer, 1, 1, 448), TKV_OK);
        CHECK_EQ(put_state(kv, 1, layer, 2, 1, 448), TKV_OK);
    }
    CHECK(has_trace(&buffer, 1, 0, 448) && has_trace(&buffer, 2, 1, 448));
    CHECK_EQ(put_state(kv, 0, 0, 3, 1, 400), TKV_OK);
    CHECK_EQ(tkv_seq_reset(kv, 0), TKV_OK);
    CHECK(!has_trace(&buffer, 1, 0, 448) && !has_trace(&buffer, 1, 1, 448) && !has_trace(&buffer, 3, 0, 400));
    CHECK_EQ(put_state(kv, 0, 0, 4, 1, 640),
             TKV_OK); /* it fits into no gap, so the states of sequence 1 move */
    check_cache_at(kv, "states moved", 0);
    for (layer = 0; layer < 2; layer++) check_state(kv, 1, layer, 2, 1, 448);
    check_state(kv, 0, 0, 4, 1, 640);
    CHECK_EQ(tkv_seq_reset(kv, 1), TKV_OK);
    CHECK(!has_trace(&buffer, 2, 0, 448) && !has_trace(&buffer, 2, 1, 448) && has_trace(&buffer, 4, 0, 640));
    CHECK_EQ(tkv_seq_reset(kv, 0), TKV_OK);
    CHECK(!has_trace(&buffer, 4, 0, 640));
    check_borders(&buffer);
    tkv_destroy(kv);
    free(buffer.raw);
}

/* >>the hybrid of the issue */
enum { HYBRID_LAYERS = 30, HYBRID_KEYS = 5, HYBRID_STEP = 64, HYBRID_POSITIONS = 100 };

static int is_attention(int layer) { return layer % HYBRID_KEYS == HYBRID_KEYS - 1; }

/* Bytes of a layer's state. Each has marks of its own at both ends and in the middle. */
static void mark_state(unsigned char *bytes, size_t size, int layer, int n) {
    const uint32_t mark = (uint32_t)n * 64u + (uint32_t)layer;
    memcpy(bytes, &mark, sizeof mark);
    memcpy(bytes + size / 2, &mark, sizeof mark);
    memcpy(bytes + size - sizeof mark, &mark, sizeof mark);
}

/* 30 layers, 24 of them recurrent with 2 MB a state, 64 positions kept under a budget. 2 MB times 24 times 64 are 3.2
 * GB. So the states are 1/32 of that by default, and TKV_TEST_LONG runs the real size. */
TEST(a_hybrid_of_30_layers_keeps_64_positions_under_a_budget) {
    static float rows[HYBRID_STEP * 2 * 64];
    static tkv_layer_config layers[HYBRID_LAYERS];
    static int at[128];
    const size_t size = (tkv_test_long() && sizeof(void *) > 4 ? (size_t)2 << 20 : (size_t)2 << 15);
    const size_t position = 24 * counted(size);
    unsigned char *bytes = (unsigned char *)calloc(1, size);
    tkv_config cfg = make_sized_config(HYBRID_LAYERS, 4, 2, 64, 1, HYBRID_STEP);
    counting_allocator p;
    tkv_rng rng = tkv_rng_seed(3);
    tkv_cache *kv;
    size_t tokens;
    int layer, n, i, count = 0;
    if (!bytes) exit(2);
    memset(layers, 0, sizeof layers);
    for (layer = 0; layer < HYBRID_LAYERS; layer++) layers[layer].no_cache = !is_attention(layer);
    cfg.layers = layers;
    tkv_rng_fill(&rng, rows, COUNT(rows), 1.0);
    CHECK_EQ(tkv_estimate_context(&cfg, 1, &n), TKV_ERR_ARG); /* no budget yet */
    cfg.budget.bytes = 1u << 31;
    {
        tkv_memory_info memory;
        CHECK_EQ(tkv_estimate_memory(&cfg, HYBRID_STEP * HYBRID_POSITIONS, 1, &memory), TKV_OK);
        tokens = memory.total;
    }
    cfg.budget.bytes =
        tokens + tokens / 4 + 66 * position; /* 65 while one is put; the index grows in steps */
    cfg.host.allocator = counting_allocator_of(&p);
    kv = create_cache(&cfg);
    for (n = HYBRID_STEP; n <= HYBRID_STEP * HYBRID_POSITIONS; n += HYBRID_STEP) {
        for (layer = 0; layer < HYBRID_LAYERS; layer++) {
            if (is_attention(layer)) {
                CHECK_EQ(tkv_append(kv, 0, layer, rows, rows, HYBRID_STEP), TKV_OK);
                continue;
            }
            mark_state(bytes, size, layer, n);
            CHECK_EQ(tkv_seq_put_state(kv, 0, layer, n, bytes, size), TKV_OK);
        }
        CHECK_EQ(tkv_seq_find_state(kv, 0, TKV_UNLIMITED), n);
        CHECK_LE(p.held, cfg.budget.bytes);
    }
    CHECK_LE(p.peak, cfg.budget.bytes);
    CHECK_EQ(p.held, total_of(kv));
    CHECK_EQ(state_bytes_of(kv), 64 * position);
    CHECK_EQ(tkv_seq_list_states(kv, 0, TKV_ALL_LAYERS, at, COUNT(at), &count), TKV_OK);
    REQUIRE(count == 64);
    CHECK_EQ(budget_of(kv).demoted, 0); /* no token paid for a state */
    CHECK_EQ(budget_of(kv).level, 0);
    check_ways_back(kv, 0, HYBRID_STEP * HYBRID_POSITIONS, HYBRID_STEP, 0.2);
    for (i = 0; i < count; i++)
        for (layer = 0; layer < HYBRID_LAYERS; layer++) {
            uint32_t mark[3];
            if (is_attention(layer)) continue;
            CHECK_EQ(tkv_seq_get_state(kv, 0, layer, at[i], bytes, size, NULL), TKV_OK);
            memcpy(mark, bytes, sizeof *mark);
            memcpy(mark + 1, bytes + size / 2, sizeof *mark);
            memcpy(mark + 2, bytes + size - sizeof *mark, sizeof *mark);
            CHECK_EQ(mark[0], (uint32_t)at[i] * 64u + (uint32_t)layer);
            CHECK(mark[0] == mark[1] && mark[1] == mark[2]);
        }
    check_cache(kv);
    /* Half of the bytes: as many positions as fit beside the tokens, and no token is coded again. */
    tokens = total_of(kv) - state_bytes_of(kv);
    CHECK_EQ(tkv_set_budget(kv, cfg.budget.bytes / 2), TKV_OK);
    CHECK_LE(p.held, cfg.budget.bytes / 2);
    count = n_positions(kv, 0);
    CHECK(count >= (int)((cfg.budget.bytes / 2 - tokens) / position) && count < 34);
    CHECK_EQ(budget_of(kv).demoted, 0);
    check_ways_back(kv, 0, HYBRID_STEP * HYBRID_POSITIONS, HYBRID_STEP, 0.4);
    /* Back by 1,000 tokens, as far as a position allows. */
    n = tkv_seq_find_state(kv, 0, HYBRID_STEP * HYBRID_POSITIONS - 1000);
    CHECK_LE(HYBRID_STEP * HYBRID_POSITIONS - 1400, n);
    CHECK_EQ(tkv_seq_truncate(kv, 0, n), TKV_OK);
    CHECK_EQ(tkv_seq_find_state(kv, 0, TKV_UNLIMITED), n);
    CHECK_EQ(tkv_get_length(kv, 0, TKV_ALL_LAYERS), n);
    check_cache(kv);
    tkv_destroy(kv);
    CHECK_EQ(p.held, 0);
    free(bytes);
}

int main(int argc, char **argv) {
    tkv_test_begin(argc, argv);
    RUN(states_come_back);
    RUN(reports_know_states);
    RUN(a_position_is_found_when_all_layers_have_it);
    RUN(states_are_refused_with_a_reason);
    RUN(forks_share_states);
    RUN(two_holders_see_their_own_states);
    RUN(no_state_of_two_holders_is_taken_over);
    RUN(forks_and_cuts_keep_the_state_at_their_end);
    RUN(cuts_take_the_states_behind_them);
    RUN(states_ahead_of_their_tokens);
    RUN(positions_are_log_spaced);
    RUN(layers_that_put_one_after_the_other_keep_the_same_positions);
    RUN(states_have_a_limit_of_their_own);
    RUN(shared_positions_go_together);
    RUN(a_shared_position_is_thinned_once);
    RUN(states_go_before_tokens);
    RUN(a_lower_budget_thins_states);
    RUN(a_state_fits_to_the_byte);
    RUN(a_fork_needs_room_for_its_list_of_states);
    RUN(a_refused_state_codes_no_token);
    RUN(states_without_memory_change_nothing);
    RUN(states_in_place);
    RUN(freed_states_are_wiped);
    RUN(a_hybrid_of_30_layers_keeps_64_positions_under_a_budget);
    return tkv_test_end();
}
