/*
 * shared_prompt.h - a program that reads a prompt through a store of prefixes (tkv_prefix_store), for the examples
 * store_*.c: what others have read of it comes out of the store, the rest is read and put there.
 *
 *     #define PROGRAM "store_lmdb"   the name in messages
 *     #include "shared_prompt.h"     before system headers
 *
 * Pages have hashes of the tables that coded them. So all programs need the same tables. The first one learns them from
 * its prompt and puts them into the store, under a hash of the model, the plan and the salt. Or give --tables FILE.
 *
 * A value that the library refuses is counted, named in a sentence, and replaced: tables at once, pages when the prompt
 * is published. A store's put replaces while `replaces` is 1, and its get adds to `n_refused` what it cannot give.
 *
 * In this order: options, tables, pages that were refused, the prompt, main.
 */
#ifndef SHARED_PROMPT_H
#define SHARED_PROMPT_H

#include "program.h"

enum { SHARED_TABLE_TOKENS = 1024 }; /* tokens that tables are learned from, at most */

typedef struct shared_prompt {
    options opt;
    llama_model model;
    tkv_config cfg;
    tkv_prefix_store store;
    const char *salt, *logits_path; /* logits_path: NULL, or a file for the logits behind the prompt */
    int *tokens, n_tokens, publishes;
    float *logits;
    int n_refused;   /* values of the store that were wrong */
    int replaces;    /* 1: put replaces the value that the store has; 0: the first value stays */
    int has_refused; /* 1: `first_refused` is the hash of a page whose value was wrong */
    tkv_prefix_hash first_refused;
} shared_prompt;

#define SHARED_PROMPT_HELP                                                                                   \
    PROGRAM_HELP "  -n N               tokens to write behind the prompt (64)\n"                             \
                 "  --salt TEXT        a tenant: other salts share nothing with it\n"                        \
                 "  --no-publish       puts nothing into the store\n"                                        \
                 "  --logits FILE      writes the logits behind the prompt, as floats of this machine\n"

/* >>options */
/* Parses an option of these programs. */
static inline parsed parse_shared_option(shared_prompt *s, const char *name, const char *value) {
    if (strcmp(name, "--no-publish") == 0) {
        s->publishes = 0;
        return ALONE;
    }
    if (!value) return UNKNOWN;
    if (strcmp(name, "--salt") == 0) s->salt = value;
    else if (strcmp(name, "--logits") == 0) s->logits_path = value;
    else return UNKNOWN;
    return WITH_VALUE;
}

/* >>tables */
static inline void read_tokens(const shared_prompt *s, tkv_cache *kv, const int *tokens, int n) {
    const double start = seconds();
    for (int done = 0; done < n;) {
        const int chunk = measure_chunk(&s->cfg, tkv_get_length(kv, 0, TKV_ALL_LAYERS), n - done);
        const tkv_status status = llama_forward(&s->model, kv, 0, tokens + done, chunk, s->logits, 1);
        if (status != TKV_OK) fail("%s", cache_fault(kv, status));
        done += chunk;
        show_bar("reading", done, n, start);
    }
}

/* The key of the tables: the hash of a cache that needs none. The formats of all layers are a part of its salt. */
static inline tkv_prefix_hash table_key(const shared_prompt *s, const char *name) {
    tkv_config cfg = s->cfg;
    tkv_cache *kv = create(&cfg);
    tkv_prefix_params p;
    tkv_prefix_hash key;
    const size_t n = (size_t)cfg.model.n_layers, size = strlen(s->salt);
    char *salt = (char *)allocate(size + 4 * n, 1);
    memcpy(salt, s->salt, size);
    for (int i = 0; i < cfg.model.n_layers; i++) {
        tkv_layer_info info;
        memset(&info, 0, sizeof info);
        (void)tkv_get_layer(kv, 0, i, &info); /* a layer without a cache has no formats */
        for (int tier = TKV_TIER_WARM; tier <= TKV_TIER_ARCHIVE; tier++) {
            salt[size + 4 * (size_t)i + 2 * (size_t)(tier - TKV_TIER_WARM)] = (char)info.format[tier].k;
            salt[size + 4 * (size_t)i + 2 * (size_t)(tier - TKV_TIER_WARM) + 1] = (char)info.format[tier].v;
        }
    }
    tkv_destroy(kv);
    cfg.tiers.warm.k = cfg.tiers.warm.v = cfg.tiers.archive.k = cfg.tiers.archive.v = TKV_F16;
    kv = create(&cfg);
    memset(&p, 0, sizeof p);
    p.model = name;
    p.model_bytes = strlen(name);
    p.salt = salt;
    p.salt_bytes = size + 4 * n;
    if (tkv_get_prefix_hash(kv, &p, 0, &key) != TKV_OK) fail("%s", tkv_get_last_error(kv));
    tkv_destroy(kv);
    free(salt);
    return key;
}

/* Learns tables from the prompt and puts them into the store, where those of another program may be first. */
static inline void learn_tables(const shared_prompt *s, const tkv_prefix_hash *key) {
    tkv_cache *kv = create(&s->cfg);
    const int n = s->n_tokens < SHARED_TABLE_TOKENS ? s->n_tokens : SHARED_TABLE_TOKENS;
    size_t size = 0;
    read_tokens(s, kv, s->tokens, n);
    tkv_status status = tkv_freeze_calibration(kv);
    if (status == TKV_OK) status = tkv_save_calibration(kv, NULL, 0, &size);
    if (status != TKV_OK) fail("%s", cache_fault(kv, status));
    void *bytes = allocate(size, 1);
    if (tkv_save_calibration(kv, bytes, size, NULL) == TKV_OK)
        (void)s->store.put(s->store.user, key, bytes, size);
    free(bytes);
    tkv_destroy(kv);
    printf("[tables learned from %s tokens: %s bytes in the store]\n", commas(n), commas((double)size));
}

/* Loads the tables of the store. Returns 0 if it has none, or wrong ones, which the next put replaces. */
static inline int load_shared_tables(shared_prompt *s, tkv_cache *kv, const tkv_prefix_hash *key) {
    const void *bytes = NULL;
    size_t size = 0;
    const int n_before = s->n_refused;
    if (s->store.get(s->store.user, key, 1, &bytes, &size) == 1 && bytes) {
        const tkv_status status = tkv_load_calibration(kv, bytes, size);
        if (status == TKV_OK) return 1;
        if (status == TKV_ERR_DATA) {
            s->n_refused++;
            fprintf(stderr, PROGRAM ": the tables in the store are damaged, and are replaced: %s\n",
                    tkv_get_last_error(kv));
        }
    }
    s->replaces = s->n_refused > n_before;
    return 0;
}

/* Makes a cache with the tables of the store. If the store fails, the cache learns its own, and shares nothing. */
static inline tkv_cache *create_shared(shared_prompt *s, const char *name) {
    const tkv_prefix_hash key = table_key(s, name);
    tkv_prefix_hash any;
    tkv_prefix_params p;
    tkv_cache *kv = create(&s->cfg);
    if (s->opt.tables) load_tables(&s->opt, kv);
    memset(&p, 0, sizeof p);
    if (tkv_get_prefix_hash(kv, &p, 0, &any) != TKV_ERR_STATE) return kv; /* no table is missing */
    for (int tries = 0; tries < 2; tries++) {
        if (load_shared_tables(s, kv, &key)) return kv;
        if (tries == 0) learn_tables(s, &key);
        s->replaces = 0;
    }
    fprintf(stderr, PROGRAM ": the store has no tables, so this program shares nothing\n");
    return kv;
}

/* >>pages that were refused. The library gets these functions in place of the store. */
static inline int get_pages(void *user, const tkv_prefix_hash *hashes, int n, const void **bytes,
                            size_t *sizes) {
    const shared_prompt *s = (const shared_prompt *)user;
    return s->store.get(s->store.user, hashes, n, bytes, sizes);
}

static inline int put_page(void *user, const tkv_prefix_hash *hash, const void *bytes, size_t size) {
    const shared_prompt *s = (const shared_prompt *)user;
    return s->store.put(s->store.user, hash, bytes, size);
}

/* Pages behind a refused one were not verified. So they are replaced with it. */
static inline int has_whole_page(void *user, const tkv_prefix_hash *hash) {
    shared_prompt *s = (shared_prompt *)user;
    if (s->has_refused && memcmp(hash, &s->first_refused, sizeof *hash) == 0) s->replaces = 1;
    return !s->replaces && s->store.has && s->store.has(s->store.user, hash);
}

/* Remembers the page behind those that were found as the first refused one. */
static inline void refuse_page(shared_prompt *s, tkv_cache *kv, const tkv_prefix_params *p, int page) {
    s->has_refused = tkv_get_prefix_hash(kv, p, page + 1, &s->first_refused) == TKV_OK;
    fprintf(stderr, PROGRAM ": a value of the store is damaged: the prompt is read again from page %d on%s\n",
            page, s->publishes ? ", and these pages are replaced" : "");
}

/* >>the prompt */
static inline void write_logits(const shared_prompt *s) {
    if (!s->logits_path) return;
    save_file f = begin_file(s->logits_path);
    (void)save_file_write(&f, s->logits, (size_t)s->model.vocab * sizeof *s->logits); /* end_file tells */
    end_file(&f);
}

/* Writes text behind the prompt. */
static inline void write_text(const shared_prompt *s, tkv_cache *kv) {
    choice *space = (choice *)allocate((size_t)s->model.vocab, sizeof *space);
    uint64_t rng = rng_seed(&s->opt);
    int before = s->tokens[s->n_tokens - 1];
    for (int i = 0; i < s->opt.n; i++) {
        const int token = sample(s->logits, s->model.vocab, &s->opt, &rng, space);
        int len;
        if (s->model.entries[token].kind == LLAMA_CONTROL) break;
        const char *piece = llama_piece(&s->model, before, token, &len);
        fwrite(piece, 1, (size_t)len, stdout);
        fflush(stdout);
        if (llama_forward(&s->model, kv, 0, &token, 1, s->logits, 1) != TKV_OK) break;
        before = token;
    }
    printf("\n");
    free(space);
}

/* Reads the prompt through the store, and writes text. */
static inline void run_shared_prompt(shared_prompt *s) {
    char name[MODEL_NAME];
    tkv_prefix_params p;
    tkv_prefix_info found, put;
    const tkv_prefix_store store = {s, get_pages, put_page, has_whole_page};
    const int context = context_of(&s->opt, &s->model);
    s->n_tokens = read_prompt(&s->model, &s->opt, context - s->opt.n, 0, 0, &s->tokens);
    s->logits = (float *)allocate((size_t)s->model.vocab, sizeof *s->logits);
    name_model(&s->model, name);
    tkv_cache *kv = create_shared(s, name);
    memset(&p, 0, sizeof p);
    memset(&put, 0, sizeof put);
    p.seq = 0;
    p.spare = 1;
    p.tokens = s->tokens;
    p.n_tokens = s->n_tokens - 1; /* the last token is always read: it gives the logits */
    p.model = name;
    p.model_bytes = strlen(name);
    p.salt = s->salt;
    p.salt_bytes = strlen(s->salt);
    const int n_refused = s->n_refused;
    const double start = latency_now();
    tkv_status status = tkv_seq_adopt_prefix(kv, &p, &store, &found);
    if (status != TKV_OK && status != TKV_ERR_STATE) fail("%s", cache_fault(kv, status));
    const double adopted = latency_now();
    s->n_refused += found.n_rejected;
    if (s->n_refused > n_refused) refuse_page(s, kv, &p, found.n_pages);
    read_tokens(s, kv, s->tokens + found.n_tokens, s->n_tokens - found.n_tokens);
    const double first = latency_now();
    write_logits(s);
    if (s->publishes && status == TKV_OK) status = tkv_seq_publish_prefix(kv, &p, &store, &put);
    if (status != TKV_OK && status != TKV_ERR_STATE) fail("%s", cache_fault(kv, status));
    const double published = latency_now();
    write_text(s, kv);
    printf("\n[prompt of %s tokens: %s from the store, %d pages in %.1f ms, %s bytes; %s read in %.1f ms]\n",
           commas(s->n_tokens), commas(found.n_tokens), found.n_pages, 1e3 * (adopted - start),
           commas((double)found.bytes), commas(s->n_tokens - found.n_tokens), 1e3 * (first - adopted));
    printf("[first token after %.1f ms; %d pages put in %.1f ms, %s bytes; %d values refused]\n",
           1e3 * (first - start), put.n_put, 1e3 * (published - first), commas((double)put.bytes),
           s->n_refused);
    tkv_destroy(kv);
    free(s->tokens);
    free(s->logits);
}

/* >>main */
static inline void begin_shared_prompt(shared_prompt *s, int argc, char **argv, const char *usage,
                                       parse_option own, void *ctx) {
    s->opt.n = 64;
    s->salt = "";
    s->publishes = 1;
    s->cfg.limits.max_seqs = 2;
    parse_options(argc, argv, usage, &s->opt, &s->cfg, own, ctx);
    if (!s->opt.model) s->opt.model = "examples/data/demo.gguf";
    load(&s->opt, &s->model, &s->cfg);
}

static inline void end_shared_prompt(shared_prompt *s) {
    plan_free(&s->cfg);
    llama_free(&s->model);
}

#endif /* SHARED_PROMPT_H */
