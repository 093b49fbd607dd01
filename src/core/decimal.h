/*
 * core/decimal.h - converts floats to decimal text and back, exactly. It does not use strtod and printf, because
 * their results depend on the locale and on compiler flags.
 *
 * A number m * 10^e and a float c * 2^x are compared as whole numbers of up to 384 bits. Both directions use only
 * this comparison. Reading finds the nearest float by bisection; the midpoint of two neighbouring floats is a float
 * with one bit more. Writing finds the shortest text that reads back as the same float.
 */
#ifndef TKVI_CORE_DECIMAL_H
#define TKVI_CORE_DECIMAL_H

#include "core/base.h"

#define TKVI_DECIMAL_LEAST                                                                                   \
    (-64) /* exponents: below this one, 19 digits are less than half of the smallest float */
#define TKVI_DECIMAL_MOST 39 /* above it, one digit is more than the largest float */
#define TKVI_FLOAT_TEXT 24   /* bytes that hold any float, final zero included */

typedef struct tkvi_wide {
    uint32_t word[12]; /* lowest word first */
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

/* Multiplies by 5^fives * 2^twos; an exponent below 0 counts as 0. */
static void tkvi_wide_scale(tkvi_wide *a, int fives, int twos) {
    for (; fives >= 13; fives -= 13) tkvi_wide_times(a, 1220703125u);
    for (; fives > 0; fives--) tkvi_wide_times(a, 5u);
    for (; twos >= 31; twos -= 31) tkvi_wide_times(a, 1u << 31);
    if (twos > 0) tkvi_wide_times(a, 1u << twos);
}

/* Returns the sign of m * 10^e - c * 2^x. e is from TKVI_DECIMAL_LEAST to TKVI_DECIMAL_MOST. c * 2^x is a
 * float or the midpoint of two. So both sides have at most 344 bits. */
static int tkvi_decimal_compare(uint64_t m, int e, uint32_t c, int x) {
    tkvi_wide a = tkvi_wide_of(m), b = tkvi_wide_of(c);
    int i;
    tkvi_wide_scale(&a, e, e - x);
    tkvi_wide_scale(&b, -e, x - e);
    for (i = 11; i >= 0; i--)
        if (a.word[i] != b.word[i]) return a.word[i] > b.word[i] ? 1 : -1;
    return 0;
}

/* Splits a positive float into c * 2^x. */
static void tkvi_float_parts(uint32_t bits, uint32_t *c, int *x) {
    uint32_t exponent = bits >> 23;
    *c = (bits & 0x7fffffu) | (exponent ? 0x800000u : 0u);
    *x = (exponent ? (int)exponent : 1) - 150;
}

/* Does m * 10^e round to the float with these bits, or to a larger one? Ties go to even. */
static int tkvi_decimal_reaches(uint64_t m, int e, uint32_t bits) {
    uint32_t c;
    int x, order;
    if (!bits) return 1;
    tkvi_float_parts(bits - 1, &c, &x);
    order = tkvi_decimal_compare(m, e, 2 * c + 1, x - 1);
    return order > 0 || (order == 0 && bits % 2 == 0);
}

/* >>reading */
#ifndef TKV_NO_REPORTS
/* Reads the float nearest to a decimal number: sign, digits, point, exponent. Digits after the 19th count as zeros.
 * Returns 0 if the text is no number, has more than 64 characters, or is too large for a float. */
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
    while (high - low > 1) { /* invariant: the number reaches low and does not reach high */
        uint32_t middle = low + (high - low) / 2;
        if (tkvi_decimal_reaches(m, e, middle)) low = middle;
        else high = middle;
    }
    *out = tkvi_from_bits(low | (negative ? 0x80000000u : 0u));
    return 1;
}
#endif /* TKV_NO_REPORTS */

/* >>writing */
/* Finds the number m * 10^e with the fewest digits that reads back as this float, and returns m. bits: of a
 * positive float. */
static uint64_t tkvi_float_shortest(uint32_t bits, int *e) {
    uint64_t m = 0, low = 100000000u, high = 1000000000u, power = high;
    uint32_t c;
    int x, first, n, i, up, is_found = 0;
    tkvi_float_parts(bits, &c, &x);
    first = bits >> 23 ? ((int)(bits >> 23) - 127) * 77 / 256 - 2
                       : -46; /* a lower bound of the first digit's exponent */
    while (tkvi_decimal_compare(1, first + 1, c, x) <= 0) first++;
    while (high - low > 1) { /* the first nine digits, truncated */
        m = low + (high - low) / 2;
        if (tkvi_decimal_compare(m, first - 8, c, x) <= 0) low = m;
        else high = m;
    }
    for (n = 1; n <= 9 && !is_found; n++) { /* nine digits identify any float */
        power /= 10u;
        *e = first - n + 1;
        up = tkvi_decimal_compare(2u * (low / power) + 1u, *e, c, x + 1) < 0; /* rounding up is nearer */
        for (i = 0; i < 2 && !is_found; i++) {
            m = low / power + (uint64_t)(up ^ i);
            is_found = tkvi_decimal_reaches(m, *e, bits) && !tkvi_decimal_reaches(m, *e, bits + 1);
        }
    }
    TKVI_ASSERT(is_found);
    return m;
}

/* Writes a finite float as text, such as 0.05, 1000, 1.5e-7, to TKVI_FLOAT_TEXT bytes. The text is valid JSON. */
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
    at = n + e; /* the point's place: the value is 0.digits * 10^at */
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

/* Appends a number of a sentence: a whole one as such, another one as the float nearest to it. */
static void tkvi_append_double(tkvi_text *t, double x) {
    char text[TKVI_FLOAT_TEXT];
    const float rounded = (float)x;
    if (!tkvi_is_finite(rounded)) {
        tkvi_append_text(t, (tkvi_bits(rounded) & 0x7fffffu) ? "NaN"
                            : tkvi_bits(rounded) >> 31       ? "-infinity"
                                                             : "infinity");
    } else if (x >= -9e15 && x <= 9e15 && x == (double)(int64_t)x) {
        tkvi_append_int(t, (int64_t)x);
    } else {
        tkvi_float_write(rounded, text);
        tkvi_append_text(t, text);
    }
}

#endif /* TKVI_CORE_DECIMAL_H */
