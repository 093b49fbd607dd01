/*
 * report/decimal.h - floats as decimal text and back, exactly: without strtod and printf, so that neither a locale
 * nor a compiler's flags have a say. May call base.
 *
 * A number m * 10^e and a float c * 2^x are compared as whole numbers of up to 384 bits. Everything follows from
 * that: the float of a text is found by halving (its neighbours' midpoints are floats with one bit more), the text of
 * a float is the shortest one that leads back to it.
 */
#ifndef TKVI_REPORT_DECIMAL_H
#define TKVI_REPORT_DECIMAL_H

#ifndef TKV_NO_REPORTS

#include "core/base.h"

#define TKVI_DECIMAL_LEAST                                                                                   \
    (-64)                    /* exponents: below, 19 digits are less than half of the smallest float ... */
#define TKVI_DECIMAL_MOST 39 /* ... and above, one digit is more than the largest */
#define TKVI_FLOAT_TEXT 24   /* room for any float, the final zero included */

typedef struct tkvi_wide {
    uint32_t word[12]; /* lowest first */
} tkvi_wide;

static tkvi_wide tkvi_wide_of(uint64_t x) {
    tkvi_wide a;
    memset(&a, 0, sizeof a);
    a.word[0] = (uint32_t)(x & 0xffffffffu);
    a.word[1] = (uint32_t)(x >> 32);
    return a;
}

static void tkvi_wide_times(tkvi_wide *a, uint32_t by) {
    uint64_t carry = 0;
    int i;
    for (i = 0; i < 12; i++) {
        carry += (uint64_t)a->word[i] * by;
        a->word[i] = (uint32_t)(carry & 0xffffffffu);
        carry >>= 32;
    }
}

/* Times 5^fives * 2^twos, where these are positive. */
static void tkvi_wide_scale(tkvi_wide *a, int fives, int twos) {
    for (; fives >= 13; fives -= 13) tkvi_wide_times(a, 1220703125u);
    for (; fives > 0; fives--) tkvi_wide_times(a, 5u);
    for (; twos >= 31; twos -= 31) tkvi_wide_times(a, 1u << 31);
    if (twos > 0) tkvi_wide_times(a, 1u << twos);
}

/* The sign of m * 10^e - c * 2^x; e within its limits, c * 2^x a float or a midpoint: 344 bits at most. */
static int tkvi_decimal_compare(uint64_t m, int e, uint32_t c, int x) {
    tkvi_wide a = tkvi_wide_of(m), b = tkvi_wide_of(c);
    int i;
    tkvi_wide_scale(&a, e, e - x);
    tkvi_wide_scale(&b, -e, x - e);
    for (i = 11; i >= 0; i--)
        if (a.word[i] != b.word[i]) return a.word[i] > b.word[i] ? 1 : -1;
    return 0;
}

/* A positive float is c * 2^x. */
static void tkvi_float_parts(uint32_t bits, uint32_t *c, int *x) {
    uint32_t exponent = bits >> 23;
    *c = (bits & 0x7fffffu) | (exponent ? 0x800000u : 0u);
    *x = (exponent ? (int)exponent : 1) - 150;
}

/* Does m * 10^e round to the float of these bits, or to a larger one? Ties go to the even one. */
static int tkvi_decimal_reaches(uint64_t m, int e, uint32_t bits) {
    uint32_t c;
    int x, order;
    if (!bits) return 1;
    tkvi_float_parts(bits - 1, &c, &x);
    order = tkvi_decimal_compare(m, e, 2 * c + 1, x - 1);
    return order > 0 || (order == 0 && bits % 2 == 0);
}

/* >>reading */
/* The float nearest to a decimal number: sign, digits, point, exponent. Digits beyond the 19th count as zeros. 0 if
 * it is no number, too large, or longer than anybody writes. */
static int tkvi_float_read(const char *s, size_t n, float *out) {
    uint64_t m = 0;
    uint32_t low = 0, high = 0x7f800000u;
    int e = 0, given = 0, point = 0, any = 0, negative, down;
    size_t i = 0;
    if (n < 1 || n > 64) return 0;
    negative = s[0] == '-';
    if (s[0] == '-' || s[0] == '+') i++;
    for (; i < n && ((s[i] >= '0' && s[i] <= '9') || (s[i] == '.' && !point)); i++) {
        if (s[i] == '.') {
            point = 1;
            continue;
        }
        any = 1;
        if (m < 1000000000000000000u) {
            m = 10u * m + (uint64_t)(s[i] - '0');
            e -= point;
        } else {
            e += !point;
        }
    }
    if (!any) return 0;
    if (i < n && (s[i] == 'e' || s[i] == 'E')) {
        i++;
        down = i < n && s[i] == '-';
        if (i < n && (s[i] == '-' || s[i] == '+')) i++;
        if (i == n) return 0;
        for (; i < n && s[i] >= '0' && s[i] <= '9'; i++)
            if (given < 1000) given = 10 * given + (s[i] - '0');
        e += down ? -given : given;
    }
    if (i < n) return 0;
    if (m == 0 || e < TKVI_DECIMAL_LEAST) high = 1; /* zero */
    else if (e > TKVI_DECIMAL_MOST || tkvi_decimal_reaches(m, e, high)) return 0;
    while (high - low > 1) { /* it reaches low, and not high */
        uint32_t middle = low + (high - low) / 2;
        if (tkvi_decimal_reaches(m, e, middle)) low = middle;
        else high = middle;
    }
    *out = tkvi_from_bits(low | (negative ? 0x80000000u : 0u));
    return 1;
}

/* >>writing */
/* The fewest digits m with m * 10^e nearer to this float than to any other; bits of a positive one. */
static uint64_t tkvi_float_shortest(uint32_t bits, int *e) {
    uint64_t m, low = 100000000u, high = 1000000000u, power = high;
    uint32_t c;
    int x, first, n, i, up;
    tkvi_float_parts(bits, &c, &x);
    first = bits >> 23 ? ((int)(bits >> 23) - 127) * 77 / 256 - 2
                       : -46; /* not above the first digit's exponent */
    while (tkvi_decimal_compare(1, first + 1, c, x) <= 0) first++;
    while (high - low > 1) { /* the first nine digits, cut off */
        m = low + (high - low) / 2;
        if (tkvi_decimal_compare(m, first - 8, c, x) <= 0) low = m;
        else high = m;
    }
    for (n = 1; n <= 9; n++) {
        power /= 10u;
        *e = first - n + 1;
        up = tkvi_decimal_compare(2u * (low / power) + 1u, *e, c, x + 1) < 0; /* the next one is nearer */
        for (i = 0; i < 2; i++) {
            m = low / power + (uint64_t)(up ^ i);
            if (tkvi_decimal_reaches(m, *e, bits) && !tkvi_decimal_reaches(m, *e, bits + 1)) return m;
        }
    }
    return m; /* not reached: nine digits tell any two floats apart */
}

/* Text of a finite float, into TKVI_FLOAT_TEXT bytes: 0.05, 1000, 1.5e-7. Also a number of JSON. */
static void tkvi_float_write(float x, char *out) {
    uint32_t bits = tkvi_bits(x);
    char digits[12];
    uint64_t m = 0;
    int e = 0, n = 0, at, i;
    tkvi_text t = tkvi_text_begin(out, TKVI_FLOAT_TEXT);
    if (bits >> 31) tkvi_append_text(&t, "-");
    if (bits & 0x7fffffffu) m = tkvi_float_shortest(bits & 0x7fffffffu, &e);
    for (; m && m % 10u == 0; m /= 10u) e++;
    {
        tkvi_text d = tkvi_text_begin(digits, sizeof digits);
        tkvi_append_int(&d, (int64_t)m);
    }
    while (digits[n]) n++;
    at = n + e; /* of the point: 0.digits * 10^at */
    if (at < -3 || at > 9) {
        char head[2] = {digits[0], 0};
        tkvi_append_text(&t, head);
        if (n > 1) tkvi_append_text(&t, ".");
        tkvi_append_text(&t, digits + 1);
        tkvi_append_text(&t, "e");
        tkvi_append_int(&t, at - 1);
        return;
    }
    if (at <= 0) tkvi_append_text(&t, "0.");
    for (i = at; i < 0; i++) tkvi_append_text(&t, "0");
    for (i = 0; i < n || i < at; i++) {
        char one[2] = {i < n ? digits[i] : '0', 0};
        if (i == at && i > 0) tkvi_append_text(&t, ".");
        tkvi_append_text(&t, one);
    }
}

#endif /* TKV_NO_REPORTS */
#endif /* TKVI_REPORT_DECIMAL_H */
