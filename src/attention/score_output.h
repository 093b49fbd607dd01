/*
 * attention/score_output.h - the consumer that fills in p->scores, the attention scores that a call asks for. It
 * takes all rows. The sums are floats, so work tiles must come in order: TKVI_OBSERVES_CALL.
 */
#ifndef TKVI_ATTENTION_SCORE_OUTPUT_H
#define TKVI_ATTENTION_SCORE_OUTPUT_H

#include "attention/attend.h"

static int tkvi_score_output_wants(const tkv_cache *kv, const tkv_attend_params *p, int stored) {
    (void)kv;
    (void)stored;
    return p->scores ? TKVI_WANTS_CALL : 0;
}

/* Adds the softmax weights of all rows for block i to p->scores. */
static TKVI_NOINLINE void tkvi_score_output_observe(const tkvi_tile_view *v, int i, const float *scores,
                                                    void *state) {
    const tkvi_work_tile *u = v->tile;
    const tkv_attend_params *p = v->params;
    float *score = p->scores + u->item * u->call->score_stride;
    int at[TKVI_BLOCK], r, t;
    (void)state;
    tkvi_slot_indices(u, i, at);
    for (r = 0; r < v->rows; r++) {
        int row = u->seq_row + tkvi_query_of(u, r);
        float lse = p->lse[(ptrdiff_t)row * u->call->plan->geometry.n_heads + tkvi_head_of(u, r)];
        const float *s = scores + r * TKVI_BLOCK;
        if (!tkvi_is_finite(lse)) continue; /* the row sees no key */
        if (p->softcap <= 0.0f) lse -= v->origin[r];
        for (t = 0; t < TKVI_BLOCK; t++)
            if (!TKVI_IS_HIDDEN(s[t])) score[at[t]] += expf(tkvi_clampf(s[t] - lse, -87.0f, 0.0f));
    }
}

static const tkvi_consumer tkvi_score_output_consumer = {
    TKVI_OBSERVES_CALL, 0, tkvi_score_output_wants, tkvi_all_rows, NULL, tkvi_score_output_observe, NULL};

#endif /* TKVI_ATTENTION_SCORE_OUTPUT_H */
