#!/bin/sh
# instructions.sh - counts the instructions of attention with valgrind, per token and KV head. Counts do not depend on the
# load of the machine.
#
#     make build/bench/instructions && bench/instructions.sh [format ...]
#
# ISA=avx2 (valgrind knows no AVX-512), CTX=8192 tokens, ARGS="--heads 1" and other options of instructions.c. A row
# is the difference of two runs with different numbers of calls. PROFILE=1 shows the functions that take most.
set -eu
program=build/bench/instructions
isa=${ISA:-avx2} ctx=${CTX:-8192}
[ $# -gt 0 ] || set -- tiers a30/r20 kivi2 kivi4 f16 q8
out=$(mktemp) && trap 'rm -f "$out" "$out".*' EXIT
count() { # count FORMAT CALLS
    # shellcheck disable=SC2086
    valgrind --tool=callgrind --callgrind-out-file="$out.$2" --toggle-collect=tkv_attend "$program" --format "$1" \
        --isa "$isa" --ctx "$ctx" --calls "$2" ${ARGS:-} 2>&1 >"$out" | sed -n 's/.*Collected : //p'
}
printf '%-12s %12s   %s\n' format instructions error
for format in "$@"; do
    one=$(count "$format" 1)
    three=$(count "$format" 3)
    heads=$(sed -n 's/.* \([0-9]*\) KV head.*/\1/p' "$out")
    printf '%-12s %12d   %s\n' "$format" $(((three - one) / 2 / ctx / heads)) "$(sed 's/.*head[s]*, //' "$out")"
    [ -z "${PROFILE:-}" ] || callgrind_annotate --auto=no "$out.3" | sed -n 's/^ *\([0-9,]* ([ 0-9.]*%)\).*:/    \1 /p' |
        head -n 24
done
