/*
 * core/codebook.h - learns levels for values between -1 and 1: weighted k-means in one dimension, from a histogram
 * (KVQuant, arXiv 2401.18079, section 3.2).
 *
 * All sums are integers, so every machine finds the same levels. A histogram of 2048 bins gives results as good as
 * the values themselves, and needs far less memory. Lloyd's iterations start from levels spaced by the cube root
 * of the density (Panter and Dite 1951), which is near the optimum. From quantiles, they end in worse optima.
 *
 * Levels are fp16 values. Beside each level stands the value that it decodes to under Q-Norm (section 3.6 of the
 * paper):
 *
 *     normed = level * s1 / s2 + (m1 - m2 * s1 / s2)
 *
 * Here m1 and s1 are mean and deviation of the values, m2 and s2 those of the values after quantization. All four
 * use the weights of k-means.
 */
#ifndef TKVI_CORE_CODEBOOK_H
#define TKVI_CORE_CODEBOOK_H

#include "core/fit.h"

#define TKVI_BOOK_BINS 2048
#define TKVI_BOOK_ROUNDS 50
#define TKVI_BOOK_PARTS 64 /* parts of the histogram that place the first levels */
#define TKVI_BOOK_UNIT 256 /* integer levels count in 1/256 of half a bin */

typedef struct tkvi_book {
    float level[16], normed[16]; /* [2^bits], rising */
} tkvi_book;

static int tkvi_book_bin(float y) { /* y: -1 .. 1 */
    int bin = (int)tkvi_f32(tkvi_f32(y + 1.0f) * (float)(TKVI_BOOK_BINS / 2));
    return tkvi_max(0, tkvi_min(TKVI_BOOK_BINS - 1, bin));
}

/* Middle of a bin, in half bins: the range -1 .. 1 is -2048 .. 2048. */
static int64_t tkvi_book_at(int bin) { return 2 * bin + 1 - TKVI_BOOK_BINS; }

/* Scales counts down to a sum below 2^31, so that no sum below overflows. Returns the sum. */
static int64_t tkvi_book_scale(int64_t *count) {
    int64_t sum = 0;
    int i, shift = 0;
    for (i = 0; i < TKVI_BOOK_BINS; i++) sum += count[i];
    while (sum >> shift >= (int64_t)1 << 31) shift++;
    for (i = 0, sum = 0; i < TKVI_BOOK_BINS; i++) sum += count[i] >>= shift;
    return sum;
}

static int64_t tkvi_cube_root(int64_t x) { /* rounded down, x < 2^54 */
    int64_t r = 0;
    int bit;
    for (bit = 17; bit >= 0; bit--) {
        int64_t next = r | (int64_t)1 << bit;
        if (next * next * next <= x) r = next;
    }
    return r;
}

/* First levels: each of the n levels stands for an equal part of the cube root of the density. */
static void tkvi_book_first(const int64_t *count, int n, int64_t *level) {
    int64_t root[TKVI_BOOK_PARTS], all = 0, before = 0;
    const int width = TKVI_BOOK_BINS / TKVI_BOOK_PARTS;
    int i, k, part = 0;
    for (i = 0; i < TKVI_BOOK_PARTS; i++) {
        int64_t sum = 0;
        for (k = 0; k < width; k++) sum += count[i * width + k];
        root[i] = tkvi_cube_root(sum << 20);
        all += root[i];
    }
    for (k = 0; k < n; k++) {
        int64_t goal = all * (2 * k + 1) / (2 * n);
        while (part < TKVI_BOOK_PARTS - 1 && before + root[part] <= goal) before += root[part++];
        level[k] = (int64_t)TKVI_BOOK_UNIT * 2 * width * part - (int64_t)TKVI_BOOK_UNIT * TKVI_BOOK_BINS;
        if (root[part]) level[k] += (goal - before) * TKVI_BOOK_UNIT * 2 * width / root[part];
    }
}

/* The nearest level of a bin; a tie takes the lower one. The search goes up from `j`: call it with rising bins. */
static int tkvi_book_nearest(const int64_t *level, int n, int j, int bin) {
    while (j < n - 1 && 2 * TKVI_BOOK_UNIT * tkvi_book_at(bin) > level[j] + level[j + 1]) j++;
    return j;
}

static void tkvi_book_means(const int64_t *count, int n, int64_t *level) {
    int round, changed = 1, i, j;
    for (round = 0; round < TKVI_BOOK_ROUNDS && changed; round++) {
        int64_t sum[16] = {0}, at[16] = {0};
        for (i = 0, j = 0; i < TKVI_BOOK_BINS; i++) {
            j = tkvi_book_nearest(level, n, j, i);
            sum[j] += count[i];
            at[j] += count[i] * tkvi_book_at(i);
        }
        for (j = 0, changed = 0; j < n; j++) {
            int64_t mean = sum[j] ? at[j] * TKVI_BOOK_UNIT / sum[j] : level[j];
            changed |= mean != level[j];
            level[j] = mean;
        }
    }
}

/* Writes levels as values, and their Q-Norm values. `count` comes from tkvi_book_scale. */
static void tkvi_book_norm(const int64_t *count, int64_t sum, int n, const int64_t *level, tkvi_book *book) {
    int64_t x1 = 0, x2 = 0, q1 = 0, q2 = 0; /* units of 1/16 of half a bin, so that squares have 30 bits */
    float mean_x, mean_q, var_x, var_q, ratio = 1.0f, shift = 0.0f;
    int i, j = 0;
    for (i = 0; i < TKVI_BOOK_BINS; i++) {
        int64_t x = 16 * tkvi_book_at(i), q;
        j = tkvi_book_nearest(level, n, j, i);
        q = level[j] / (TKVI_BOOK_UNIT / 16);
        x1 += count[i] * x;
        x2 += count[i] * x * x;
        q1 += count[i] * q;
        q2 += count[i] * q * q;
    }
    mean_x = tkvi_f32((float)x1 / (float)sum);
    mean_q = tkvi_f32((float)q1 / (float)sum);
    var_x = tkvi_f32(tkvi_f32((float)x2 / (float)sum) - tkvi_product(mean_x, mean_x));
    var_q = tkvi_f32(tkvi_f32((float)q2 / (float)sum) - tkvi_product(mean_q, mean_q));
    if (var_x > 1.0f && var_q > 1.0f) {
        ratio = tkvi_clampf(tkvi_f32(sqrtf(tkvi_f32(var_x / var_q))), 0.125f, 3.0f);
        shift = tkvi_f32(mean_x - tkvi_product(mean_q, ratio)) / (float)(16 * TKVI_BOOK_BINS);
    }
    for (j = 0; j < n; j++) {
        float y = (float)level[j] / (float)(TKVI_BOOK_UNIT * TKVI_BOOK_BINS);
        book->level[j] = tkvi_f16_to_f32(tkvi_f32_to_f16(y));
        y = tkvi_f32(tkvi_product(book->level[j], ratio) + shift);
        book->normed[j] = tkvi_f16_to_f32(tkvi_f32_to_f16(y));
    }
}

/* Levels without a histogram: evenly spaced from -1 to 1, or fitted to a normal distribution. */
static void tkvi_book_standard(int bits, int uniform, tkvi_book *book) {
    static const uint16_t normal[3][8] = {{404, 1340, 0, 0, 0, 0, 0, 0}, /* in 1/2048; upper half */
                                          {207, 638, 1126, 1758, 0, 0, 0, 0},
                                          {102, 306, 518, 742, 983, 1253, 1567, 1955}};
    int n = 1 << bits, i;
    memset(book, 0, sizeof *book);
    for (i = 0; i < n / 2; i++) {
        float y = (float)normal[bits - 2][i] / 2048.0f;
        if (uniform) y = tkvi_f16_to_f32(tkvi_f32_to_f16(tkvi_f32((float)(2 * i + 1) / (float)(n - 1))));
        book->level[n / 2 + i] = y;
        book->level[n / 2 - 1 - i] = -y;
    }
    memcpy(book->normed, book->level, sizeof book->normed);
}

/* Makes the levels for a histogram, whose counts it scales. An empty histogram gives the standard levels. */
static void tkvi_book_make(int64_t *count, int bits, int uniform, tkvi_book *book) {
    int64_t level[16], sum = tkvi_book_scale(count);
    int n = 1 << bits, j;
    tkvi_book_standard(bits, uniform, book);
    if (sum == 0) return;
    for (j = 0; j < n && uniform; j++)
        level[j] = (int64_t)(book->level[j] * (float)(TKVI_BOOK_UNIT * TKVI_BOOK_BINS));
    if (!uniform) {
        tkvi_book_first(count, n, level);
        tkvi_book_means(count, n, level);
    }
    tkvi_book_norm(count, sum, n, level, book);
}

#endif /* TKVI_CORE_CODEBOOK_H */
