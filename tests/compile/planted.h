/* A fault that each analyser of tools/analyse.py has to find: an index behind an array, and what is never written. */
int planted(int n);

int planted(int n) {
    int x[2], *nothing = 0;
    if (n > 2) return x[0] + *nothing;
    x[0] = 1.5 * n; /* a narrowing, for clang-tidy */
    return x[0];
}
