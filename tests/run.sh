#!/bin/sh
# Runs test programs and adds up their last lines, `N passed, N failed[, N skipped]`.
#   tests/run.sh [-q] program ...      -q shows the output of failing programs only
# RUNNER="qemu-s390x" runs C programs through another program. A Python test counts as skipped where there is
# no Python, or no numpy if it wants that. A program that crashes, or whose last line is something else, is
# one failed test.
quiet=0
if [ "${1:-}" = -q ]; then
    quiet=1
    shift
fi
python=${PYTHON:-python3}
out=$(mktemp) || exit 1
trap 'rm -f "$out"' EXIT
passed=0 failed=0 skipped=0
for program in "$@"; do
    case $program in
    *.py)
        need=unittest
        if grep -q 'import numpy' "$program"; then need=numpy; fi
        if ! "$python" -c "import $need" 2>/dev/null; then
            [ $quiet = 1 ] || echo "$program: skipped, no $python with $need"
            skipped=$((skipped + 1))
            continue
        fi
        "$python" "$program" >"$out" 2>&1
        ;;
    *) ${RUNNER:-} "$program" >"$out" 2>&1 ;;
    esac
    status=$?
    set -- $(tail -n 1 "$out" | tr -d '\r' |
        sed -n -E 's/^([0-9]+) passed, ([0-9]+) failed(, ([0-9]+) skipped)?$/\1 \2 \4/p') # or nothing
    p=${1:-0} f=${2:-0} s=${3:-0}
    if [ $# -eq 0 ] || { [ $status -ne 0 ] && [ "$f" -eq 0 ]; }; then
        echo "ended with status $status and without a count of failures in its last line" >>"$out"
        f=$((f + 1))
    fi
    if [ $quiet = 0 ] || [ "$f" -gt 0 ]; then
        echo "$program"
        cat "$out"
    fi
    passed=$((passed + p)) failed=$((failed + f)) skipped=$((skipped + s))
done
line="$passed passed, $failed failed"
[ $skipped -eq 0 ] || line="$line, $skipped skipped"
echo "$line"
[ $failed -eq 0 ] && [ $((passed + skipped)) -gt 0 ]
