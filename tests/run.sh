#!/bin/sh
# Runs test programs and adds up the counts in their last lines, `N passed, N failed[, N skipped]`.
#   tests/run.sh [-q] program ...      -q shows only the output of failing programs
# RUNNER="qemu-s390x" runs C programs with another program. A Python test counts as skipped if Python, or a numpy
# that it imports, is missing. A program that crashes, or whose last line has no counts, is one failed test.
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
            [ $quiet = 1 ] || echo "$program: skipped, because $python has no $need"
            skipped=$((skipped + 1))
            continue
        fi
        "$python" "$program" >"$out" 2>&1
        ;;
    *) ${RUNNER:-} "$program" >"$out" 2>&1 ;;
    esac
    status=$?
    set -- $(tail -n 1 "$out" | tr -d '\r' |
        sed -n -E 's/^([0-9]+) passed, ([0-9]+) failed(, ([0-9]+) skipped)?$/\1 \2 \4/p') # empty: no counts
    p=${1:-0} f=${2:-0} s=${3:-0}
    if [ $# -eq 0 ] || { [ $status -ne 0 ] && [ "$f" -eq 0 ]; }; then
        echo "the status is $status, and the last line has no count of failures" >>"$out"
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
