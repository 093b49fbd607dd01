/*
 * test_named_budgets.c - the two budgets that a sentence of creation names, for random configs: the least, of an empty
 * cache, and one that is enough for the first tokens of a sequence, one at a time; with a policy for any number.
 */
#include "kit.h"

enum { LAYERS = 5, LEVELS = 4, KV_HEADS = 4, HEADS = 12, MOST_DIM = 128, N_ROWS = 61 };

static tkv_rng rng;
static float k_in[N_ROWS * KV_HEADS * MOST_DIM], v_in[N_ROWS * KV_HEADS * MOST_DIM];
static float queries[N_ROWS * HEADS * MOST_DIM], output[HEADS * MOST_DIM];

static int below(int n) { return tkv_rng_below(&rng, n); }
static int one_in(int n) { return below(n) == 0; }

/* A config whose pointers lead here. */
typedef struct random_plan {
    tkv_config cfg;
    tkv_layer_config layers[LAYERS];
    tkv_level ladder[LEVELS];
} random_plan;

static float score_by_position(void *user, const tkv_evict_view *view, int i) {
    (void)user;
    return (float)(view->positions[i] % 7);
}

static tkv_format_pair random_pair(void) {
    return pair_of((tkv_format)below(TKV_FORMAT_COUNT), (tkv_format)below(TKV_FORMAT_COUNT));
}

/* A length of a tier: the default, none, all, or some. */
static int random_length(int most) {
    const int kind = below(8);
    return kind < 3 ? 0 : kind == 3 ? TKV_OFF : kind == 4 ? TKV_UNLIMITED : 1 + below(most);
}

static void choose_model(tkv_model_config *m) {
    static const int dims[] = {8, 16, 24, 33, 64, MOST_DIM};
    m->n_layers = 1 + below(LAYERS);
    m->n_kv_heads = 1 + below(KV_HEADS);
    m->n_heads = m->n_kv_heads * (1 + below(HEADS / KV_HEADS));
    m->head_dim = dims[below(COUNT(dims))];
    if (one_in(4)) m->v_head_dim = 1 + below(m->head_dim);
    m->v_in_k = one_in(8);
    if (one_in(4)) {
        m->window = 20 + below(400);
        m->window_sinks = below(2);
    }
    if (one_in(2)) m->rope.dim = m->head_dim & ~1;
}

static void choose_tiers(tkv_config *cfg) {
    if (one_in(3)) cfg->tiers.sink_tokens = one_in(2) ? TKV_OFF : 1 + below(64);
    if (one_in(2)) cfg->tiers.hot_tokens = random_length(300);
    if (one_in(2)) cfg->tiers.warm_tokens = random_length(600);
    if (one_in(4)) cfg->tiers.hot = one_in(2) ? pair_of(TKV_F32, TKV_F32) : pair_of(TKV_BF16, TKV_BF16);
    if (one_in(2)) cfg->tiers.warm = random_pair();
    if (one_in(2)) cfg->tiers.archive = random_pair();
    if (one_in(6)) cfg->tiers.n_anchors = 1 + below(200);
    if (one_in(5)) cfg->format.group_size = 32;
    if (one_in(5)) cfg->format.allocation_unit = 16;
    if (one_in(8)) cfg->format.k_scales = below(4);
}

static void choose_eviction(tkv_evict_config *e) {
    e->policy = (tkv_evict_policy)(1 + below(TKV_EVICT_COUNT - 1));
    if (e->policy == TKV_EVICT_USER) e->scorer = score_by_position;
    if (one_in(3)) e->keep_tokens = 20 + below(500);
    if (e->keep_tokens && one_in(4)) {
        e->keep_first = 100 + below(100);
        e->keep_last = 50 + below(100);
    }
    if (one_in(3)) e->recent_tokens = one_in(2) ? TKV_OFF : 1 + below(150);
    if (one_in(3)) e->sink_tokens = one_in(2) ? TKV_OFF : 1 + below(100);
    if (one_in(4)) e->batch = 1 + below(64);
}

static void choose_levels(random_plan *plan) {
    static const tkv_format formats[] = {TKV_F16, TKV_Q8, TKV_KIVI4, TKV_KIVI3, TKV_KIVI2};
    tkv_budget_config *b = &plan->cfg.budget;
    int i;
    if (one_in(4)) {
        b->ladder = plan->ladder;
        b->n_levels = 1 + below(LEVELS);
        for (i = 0; i < b->n_levels; i++) {
            tkv_level *level = &plan->ladder[i];
            level->warm = one_in(4) ? random_pair()
                                    : pair_of(formats[below(COUNT(formats))], formats[below(COUNT(formats))]);
            level->archive = one_in(4) ? random_pair() : level->warm;
            if (one_in(3)) level->hot_tokens = random_length(200);
            if (one_in(3)) level->warm_tokens = random_length(400);
        }
    }
    if (one_in(3)) b->pressure.max_level = one_in(3) ? TKV_OFF : below(LEVELS);
    if (one_in(4)) b->pressure.min_level = below(LEVELS);
    if (one_in(3)) b->pressure.profile = (tkv_pressure_profile)below(TKV_PROFILE_COUNT);
    if (one_in(6)) b->pressure.jump = 1;
    if (one_in(5)) b->discard = 1;
}

static void choose_layers(random_plan *plan) {
    int i;
    plan->cfg.layers = plan->layers;
    for (i = 0; i < plan->cfg.model.n_layers; i++) {
        tkv_layer_config *l = &plan->layers[i];
        switch (below(9)) {
        case 0: l->no_cache = 1; break;
        case 1: l->share_kv = i ? 1 + below(i) : 0; break;
        case 2: l->hot_tokens = random_length(200); break;
        case 3: l->window = 10 + below(200); break;
        case 4: l->head_dim = 32, l->n_kv_heads = 1; break;
        case 5: l->warm = random_pair(); break;
        case 6: l->archive = random_pair(); break;
        default: break;
        }
    }
}

static void choose_plan(random_plan *plan) {
    tkv_config *cfg = &plan->cfg;
    memset(plan, 0, sizeof *plan);
    *cfg = tkv_default_config();
    cfg->host.isa = tkv_test_isa();
    choose_model(&cfg->model);
    choose_tiers(cfg);
    if (one_in(2)) choose_eviction(&cfg->evict);
    if (one_in(2)) choose_levels(plan);
    if (one_in(3)) choose_layers(plan);
    cfg->limits.max_seqs = one_in(2) ? 0 : 1 + below(40);
    if (one_in(3)) cfg->limits.max_tokens = 1 + below(2000);
    if (one_in(3)) cfg->limits.max_append = 1 + below(500);
    if (HAS_ATOMICS && one_in(3)) cfg->importance.sample_every = 1 + below(10);
    if (HAS_ATOMICS && one_in(8)) cfg->meter.heads = 1 + below(2);
    cfg->host.wipe_freed = one_in(6);
}

static int is_kvquant(tkv_format_pair p) {
    return (p.k >= TKV_KVQUANT4 && p.k <= TKV_KVQUANT2) || (p.v >= TKV_KVQUANT4 && p.v <= TKV_KVQUANT2);
}

/* 1 if a format may fix the slots of tokens, so that evictions merge no blocks. */
static int may_fix_slots(const random_plan *plan) {
    int i, found = is_kvquant(plan->cfg.tiers.warm) || is_kvquant(plan->cfg.tiers.archive);
    for (i = 0; i < LEVELS; i++)
        found |= is_kvquant(plan->ladder[i].warm) || is_kvquant(plan->ladder[i].archive);
    for (i = 0; i < LAYERS; i++)
        found |= is_kvquant(plan->layers[i].warm) || is_kvquant(plan->layers[i].archive);
    return found;
}

/* The numbers of the sentence that refuses a budget of 1 byte. Returns 0 if another one refuses the config. */
static int read_named(const tkv_config *cfg, size_t *least, size_t *enough, int *n_tokens) {
    char reason[300];
    unsigned long long numbers[2];
    const char *at;
    if (tkv_validate_config(cfg, reason, sizeof reason) != TKV_ERR_BUDGET) return 0;
    at = strstr(reason, "at least ");
    CHECK_MSG(at && sscanf(at, "at least %llu for an empty cache; %llu is enough for the first %d tokens",
                           &numbers[0], &numbers[1], n_tokens) == 3,
              "%s", reason);
    *least = (size_t)numbers[0];
    *enough = (size_t)numbers[1];
    return at != NULL;
}

/* Appends tokens one at a time to a cache with the named budget, in all layers, with attention or without. */
static void append_all(int seed, const random_plan *plan, int n_tokens, int attends) {
    const tkv_config *cfg = &plan->cfg;
    tkv_cache *kv = create_cache(cfg);
    tkv_memory_info memory;
    tkv_status st = TKV_OK;
    int t, layer;
    for (t = 0; t < n_tokens && !st; t++)
        for (layer = 0; layer < cfg->model.n_layers && !st; layer++) {
            const size_t row = (size_t)((t * 7 + layer) % N_ROWS);
            const int stores =
                !cfg->layers || !(plan->layers[layer].no_cache || plan->layers[layer].share_kv);
            if (!stores) continue;
            st = tkv_append(kv, 0, layer, k_in + row * KV_HEADS * MOST_DIM,
                            cfg->model.v_in_k ? NULL : v_in + row * KV_HEADS * MOST_DIM, 1);
            if (!st && attends)
                CHECK_EQ(tkv_attend(kv, 0, layer, queries + row * HEADS * MOST_DIM, 1, output), TKV_OK);
        }
    CHECK_MSG(!st, "seed %d, attends %d: %.0f bytes refuse token %d of %d: %s", seed, attends,
              (double)cfg->budget.bytes, t - 1, n_tokens, tkv_get_last_error(kv));
    CHECK_EQ(tkv_get_memory(kv, &memory), TKV_OK);
    CHECK_LE(memory.peak, cfg->budget.bytes);
    check_cache(kv);
    tkv_destroy(kv);
}

/* Returns 1 if the config is valid. */
static int check_seed(int seed, int n_evicting) {
    random_plan plan;
    tkv_config *cfg = &plan.cfg;
    tkv_cache *kv = NULL;
    char reason[300];
    size_t least, enough;
    int n_tokens, n;
    rng = tkv_rng_seed((uint64_t)seed);
    choose_plan(&plan);
    cfg->budget.bytes = 1;
    if (!read_named(cfg, &least, &enough, &n_tokens)) return 0;
    CHECK_LE(least, enough);
    cfg->budget.bytes = least - 1;
    CHECK_EQ(tkv_validate_config(cfg, reason, sizeof reason), TKV_ERR_BUDGET);
    CHECK_EQ(tkv_create(cfg, &kv), TKV_ERR_BUDGET);
    cfg->budget.bytes = least;
    CHECK_EQ(tkv_validate_config(cfg, reason, sizeof reason), TKV_OK);
    tkv_destroy(create_cache(cfg));
    cfg->budget.bytes = enough;
    n = cfg->evict.policy && !may_fix_slots(&plan) && n_evicting > n_tokens ? n_evicting : n_tokens;
    if (cfg->limits.max_tokens && n > cfg->limits.max_tokens) n = cfg->limits.max_tokens;
    if (!tkv_test_quick() || seed % 2) append_all(seed, &plan, n, 0);
    if (!tkv_test_quick() || seed % 2 == 0) append_all(seed, &plan, n, 1);
    return 1;
}

TEST(a_named_budget_is_enough) {
    const int n_seeds = tkv_test_quick() ? 40 : tkv_test_long() ? 20000 : 250;
    int seed, n_valid = 0;
    tkv_rng fill = tkv_rng_seed(3);
    tkv_rng_fill(&fill, k_in, COUNT(k_in), 1.0);
    tkv_rng_fill(&fill, v_in, COUNT(v_in), 1.0);
    tkv_rng_fill(&fill, queries, COUNT(queries), 1.0);
    for (seed = 0; seed < n_seeds; seed++)
        n_valid += check_seed(seed, seed % 8 || tkv_test_quick() ? 700 : 2500);
    CHECK(n_valid > n_seeds / 4);
}

int main(int argc, char **argv) {
    tkv_test_begin(argc, argv);
    RUN(a_named_budget_is_enough);
    return tkv_test_end();
}
