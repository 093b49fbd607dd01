/*
 * rules/select.h - selects the k lowest of n scores in O(n) and allocates nothing. It also has bit masks over
 * slots.
 *
 * The selection is a radix selection: each float becomes an integer of the same order, and each pass finds 8 bits
 * of the k-th lowest one. Of equal scores the lower index comes first, so every machine selects the same slots.
 */
#ifndef TKVI_RULES_SELECT_H
#define TKVI_RULES_SELECT_H

#include "core/base.h"

/* >>masks: slot i is bit i % 64 of word i / 64 */
static int tkvi_has(const uint64_t *mask, int i) { return (int)(mask[i >> 6] >> (i & 63) & 1u); }

static void tkvi_mark(uint64_t *mask, int i) { mask[i >> 6] |= (uint64_t)1 << (i & 63); }

static int tkvi_words(int n) { return (int)(((int64_t)n + 63) / 64); }

/* >>ranks */
typedef struct tkvi_ranks {
    int n;
    const float *score;          /* finite */
    const signed char *priority; /* NULL, or the major sort key: the score decides within a priority */
    const uint64_t *without;     /* a mask of slots to leave out */
} tkvi_ranks;

/* Returns slot i's rank, an integer in the order of priority, then score. A positive float gets its sign bit
 * flipped, a negative one all bits. Both zeros have the same rank. */
static uint64_t tkvi_rank(const tkvi_ranks *r, int i) {
    const uint32_t bits = tkvi_bits(r->score[i]), u = bits == 0x80000000u ? 0u : bits;
    const uint32_t order = u ^ ((0u - (u >> 31)) | 0x80000000u);
    return (uint64_t)(r->priority ? r->priority[i] + 128 : 0) << 32 | order;
}

static int tkvi_takes_part(const tkvi_ranks *r, int i) { return !tkvi_has(r->without, i); }

/* Returns the k-th lowest rank. k is from 1 to the number of slots that take part. *equal: how many of the k lowest
 * slots have exactly this rank. */
static uint64_t tkvi_select(const tkvi_ranks *r, int k, int *equal) {
    uint64_t found = 0, known = 0;
    int i, shift;
    for (shift = r->priority ? 32 : 24; shift >= 0; shift -= 8) {
        int count[256], digit = 0;
        memset(count, 0, sizeof count);
        for (i = 0; i < r->n; i++) {
            uint64_t rank;
            if (!tkvi_takes_part(r, i)) continue;
            rank = tkvi_rank(r, i);
            if ((rank & known) == found) count[rank >> shift & 255u]++;
        }
        while (k > count[digit]) k -= count[digit++];
        found |= (uint64_t)digit << shift;
        known |= (uint64_t)255 << shift;
    }
    *equal = k;
    return found;
}

#endif /* TKVI_RULES_SELECT_H */
