/*
 * calibrate.h - makes tables for A and R formats in advance from a text. Include examples/llama.h first.
 *
 *     tables = calibrate(&m, tokens, n, context, NULL, &bytes, &status);   bytes of tkv_save_calibration
 *
 * A cache normally makes its first table after 256 tokens. In an open step the cache demotes nothing and makes no
 * table, but attention still collects statistics, from exact keys and values under any plan. So this function reads
 * each `context` tokens of the text in one open step. tkv_freeze_calibration then makes the tables. Statistics of
 * queries and of far attention come from the whole text. The variance of keys comes from at most 1,024 tokens
 * (TKVI_LEARN_BLOCKS).
 */
#ifndef TKV_CALIBRATE_H
#define TKV_CALIBRATE_H

/* Returns the tables, which the caller frees; NULL after an error in *status. `progress` (may be NULL) receives the
 * number of tokens of each chunk. */
static unsigned char *calibrate(const llama_model *m, const int *tokens, int n, int context,
                                void (*progress)(int done), size_t *bytes, tkv_status *status) {
    tkv_config cfg = tkv_default_config();
    unsigned char *table = NULL;
    llama_kv_config(m, &cfg);
    cfg.limits.max_seqs = (n + context - 1) / context;
    cfg.limits.max_append = context;
    llama_cache cache;
    cache.kv = NULL;
    tkv_status st = tkv_create(&cfg, &cache.kv);
    for (cache.seq = 0; st == TKV_OK && cache.seq < cfg.limits.max_seqs; cache.seq++)
        st = tkv_seq_begin(cache.kv, cache.seq);
    int step;
    for (int at = 0; st == TKV_OK && at < n; at += step) {
        const int pos = at % context, left = n - at < context - pos ? n - at : context - pos;
        step = left < TKV_BLOCK_TOKENS ? left : TKV_BLOCK_TOKENS;
        cache.seq = at / context;
        cache.pos = pos;
        st = llama_forward_with(m, tokens + at, step, pos, llama_tiered, &cache, NULL, 0);
        if (progress) progress(step);
    }
    for (cache.seq = 0; st == TKV_OK && cache.seq < cfg.limits.max_seqs; cache.seq++)
        st = tkv_seq_commit(cache.kv, cache.seq);
    if (st == TKV_OK) st = tkv_freeze_calibration(cache.kv);
    if (st == TKV_OK) st = tkv_save_calibration(cache.kv, NULL, 0, bytes);
    if (st == TKV_OK) {
        table = (unsigned char *)malloc(*bytes);
        st = table ? tkv_save_calibration(cache.kv, table, *bytes, bytes) : TKV_ERR_NOMEM;
    }
    tkv_destroy(cache.kv);
    if (st != TKV_OK) free(table), table = NULL;
    *status = st;
    return table;
}

/* Returns 1 if a plan has a format with tables. */
static int calibrate_changes(const tkv_config *cfg) {
    const tkv_format_pair *warm = &cfg->tiers.warm, *archive = &cfg->tiers.archive;
    const tkv_format f[4] = {warm->k, warm->v, archive->k, archive->v};
    for (int i = cfg->tiers.warm_tokens == TKV_OFF ? 2 : 0; i < 4; i++)
        if (f[i] == TKV_FORMAT_DEFAULT || (f[i] >= TKV_A40 && f[i] <= TKV_R10) ||
            (f[i] >= TKV_KVQUANT4 && f[i] <= TKV_KVQUANT2))
            return 1;
    return 0;
}

#endif /* TKV_CALIBRATE_H */
