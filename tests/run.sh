#!/bin/sh
# Runs test programs and adds up the counts in their last lines, `N passed, N failed[, N skipped]`.
#   tests/run.sh [-q] program ...      -q shows only the output of failing programs
# RUNNER="qemu-s390x" runs C programs with another program. A program that crashes, or whose last line has no counts, is
# one failed test. Every skipped test is counted, and before the last line stands why: `skipped N of PROGRAM: reason`.
# All tests of a Python program are skipped if Python, or a numpy that it imports, is missing.
quiet=0
if [ "${1:-}" = -q ]; then
    quiet=1
    shift
fi
python=${PYTHON:-python3}
out=$(mktemp) && reasons=$(mktemp) || exit 1
trap 'rm -f "$out" "$reasons"' EXIT
passed=0 failed=0 skipped=0
for program in "$@"; do
    case $program in
    *.py)
        need=unittest
        if grep -q 'import numpy' "$program"; then need=numpy; fi
        if ! "$python" -c "import $need" 2>/dev/null; then
            n=$(grep -cE '^ +def test_' "$program") # test_encoder.py has cases in place of methods
            [ "$n" -gt 0 ] || n=1
            echo "skipped $n of $program: $python has no $need" >>"$reasons"
            skipped=$((skipped + n))
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
    # `skipped NAME: reason` in Python; in C `NAME skipped: reason, SECONDS s`, without seconds where there is no clock
    [ "$s" -eq 0 ] || tr -d '\r' <"$out" | sed -n -E -e 's/^skipped [^:]+: (.*)$/\1/p' \
        -e 's/^  [a-z0-9_]+ +skipped: (.*)$/\1/p' | sed -E 's/, [0-9.]+ s$//' | sort | uniq -c |
        while read -r n why; do echo "skipped $n of $program: $why"; done >>"$reasons"
done
cat "$reasons"
line="$passed passed, $failed failed"
[ $skipped -eq 0 ] || line="$line, $skipped skipped"
echo "$line"
[ $failed -eq 0 ] && [ $((passed + skipped)) -gt 0 ]
