/*
 * calibrate.h - tables for A and R formats, made in advance from a text. Include examples/llama.h first.
 *
 *     tables = calibrate(&m, tokens, n, context, NULL, &bytes, &status);   what tkv_save_calibration gives
 *
 * A cache learns from 512 tokens and then makes its tables. In an open step nothing is demoted and no table is
 * made, but attention goes on counting: whatever the plan, a step of n tokens counts n queries over exact keys
 * and values. So a text of any length is read in one open step for each `context` tokens of it, and
 * tkv_freeze_calibration makes the tables: how channels are asked and who reads far from all of the text, how
 * keys vary from 1,024 tokens at most (TKVI_LEARN_BLOCKS).
 */
#ifndef TKV_CALIBRATE_H
#define TKV_CALIBRATE_H

/* To be freed. NULL: *status says why. `progress` (may be NULL) is called with the tokens of each chunk. */
static unsigned char *calibrate(const llama_model *m, const int *tokens, int n, int context,
                                void (*progress)(int done), size_t *bytes, tkv_status *status) {
    tkv_config cfg = tkv_default_config();
    unsigned char *table = NULL;
    llama_cache cache;
    tkv_status st;
    int at, step;
    llama_kv_config(m, &cfg);
    cfg.limits.max_seqs = (n + context - 1) / context;
    cfg.limits.max_append = context;
    cache.kv = NULL;
    st = tkv_create(&cfg, &cache.kv);
    for (cache.seq = 0; st == TKV_OK && cache.seq < cfg.limits.max_seqs; cache.seq++)
        st = tkv_seq_begin(cache.kv, cache.seq);
    for (at = 0; st == TKV_OK && at < n; at += step) {
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

/* Whether a plan has a format that learns, so that a table changes it. */
static int calibrate_changes(const tkv_config *cfg) {
    const tkv_format_pair *warm = &cfg->tiers.warm, *archive = &cfg->tiers.archive;
    const tkv_format f[4] = {warm->k, warm->v, archive->k, archive->v};
    int i;
    for (i = cfg->tiers.warm_tokens == TKV_OFF ? 2 : 0; i < 4; i++)
        if (f[i] == TKV_FORMAT_DEFAULT || (f[i] >= TKV_A40 && f[i] <= TKV_R10) ||
            (f[i] >= TKV_KVQUANT4 && f[i] <= TKV_KVQUANT2))
            return 1;
    return 0;
}

#endif /* TKV_CALIBRATE_H */
