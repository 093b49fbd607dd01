/* A fault that each analyser of tools/analyse.py has to find: an index behind an array, and what is never written.
 * Nothing calls the function: a tool has to look at such ones too. */
static int planted(int n);

static int planted(int n) {
    int x[2], *nothing = 0;
    if (n > 2) return x[0] + *nothing;
    x[0] = 1.5 * n; /* a narrowing, for clang-tidy */
    return x[0];
}
