# shellcheck shell=bash
# What .ci/run and .ci/integrations share: tools, cells, the last line. The script sets DIR, its folder under build/,
# sources this file from the root of the project, and calls start "$@" before any cell.
#
# STRICT=1, or any CI in the environment: a cell that is not run, since something is missing, has failed.
# JOBS: how many cells run at a time. LIMIT: the seconds that a cell may take, if the script sets it.
unset CC CFLAGS LIBRARY TKV_ISA TKV_TEST_QUICK TKV_TEST_LONG TKV_TEST_FILTER MODEL PROMPT N
export LC_ALL=C
STRICT=${STRICT:-${CI:+1}}
JOBS=${JOBS:-$(nproc)}
LIMIT=${LIMIT:-}
only=() failures=() missing=() places=()
passed=0 failed=0 n_cells=0

start() { # start [part of a cell's name ...]
    only=("$@")
    # Two runs in one tree would remove each other's programs. A server of wine keeps the lock for some seconds.
    mkdir -p "${DIR%/*}"
    exec 8>"$DIR.lock"
    if command -v flock >/dev/null && ! flock -w 10 8; then
        echo "failed: $0 runs already in this tree"
        echo '0 passed, 1 failed'
        exit 1
    fi
    rm -rf "$DIR"
    mkdir -p "$DIR"
    echo "$(uname -sm), $(nproc) processors, $JOBS cells at a time${STRICT:+, strict}"
}

# >>tools. `have NAME` asks for a command, `have "COMPILER FLAGS"` whether a program can be built.
declare -A found # each answer, since asking takes time

have() {
    if [ -z "${found[$*]:-}" ]; then
        found[$*]=no
        # shellcheck disable=SC2086
        look_for $* && found[$*]=yes
    fi
    [ "${found[$*]}" = yes ]
}

look_for() {
    command -v "$1" >/dev/null || return 1
    [ $# = 1 ] && return 0
    mkdir -p "$DIR/probe"
    printf '#include <math.h>\n#include <stdio.h>\nint main(void) { return 0; }\n' >"$DIR/probe/probe.c"
    "$@" "$DIR/probe/probe.c" -o "$DIR/probe/probe" >/dev/null 2>&1
}

install_tools() { # install_tools "TABLE" [package ...]: the table has lines `tool | packages`
    local table=$1 probe packages wanted
    shift
    wanted=("$@")
    while IFS='|' read -r probe packages; do
        probe=${probe% }
        # shellcheck disable=SC2206
        [ -z "$probe" ] || have "$probe" || wanted+=($packages)
    done <<<"$table"
    [ ${#wanted[@]} -gt 0 ] || return 0
    echo "installing: ${wanted[*]}"
    if [ "$(id -u)" != 0 ] || ! have apt-get; then
        echo 'cannot: that takes apt-get and root'
        return 0
    fi
    apt-get update -q >"$DIR/apt.log" 2>&1
    DEBIAN_FRONTEND=noninteractive apt-get install -y -q --no-install-recommends "${wanted[@]}" \
        >>"$DIR/apt.log" 2>&1 || tail -n 5 "$DIR/apt.log"
    found=()
}

# >>cells. `cell NAME [TOOL ...] -- FUNCTION ...` runs the function in the background when there is room, with
# a directory of its own in $P; its output goes to a file.
is_chosen() {
    [ ${#only[@]} -gt 0 ] || return 0
    local part
    for part in "${only[@]}"; do [[ $1 == *"$part"* ]] && return 0; done
    return 1
}

cell() {
    local name=$1
    shift
    is_chosen "$name" || return 0
    while [ "$1" != -- ]; do
        if ! have "$1"; then
            missing+=("$name: no $1")
            return 0
        fi
        shift
    done
    shift
    while [ "$(jobs -rp | wc -l)" -ge "$JOBS" ]; do wait -n; done
    local P=$DIR/${name//[^a-zA-Z0-9+]/_}
    mkdir -p "$P"
    echo "$name" >"$P/name"
    places+=("$P")
    n_cells=$((n_cells + 1))
    run_cell "$name" "$P" "$@" &
}

run_cell() {
    local name=$1 P=$2 began=$SECONDS status counts cost TIMEFORMAT='%0U + %0S'
    shift 2
    { time run_limited "$@" >"$P/log" 2>&1; } 2>"$P/time"
    status=$?
    cost="$((SECONDS - began)) s, CPU $(($(tail -n 1 "$P/time"))) s"
    if [ $status = 0 ]; then
        counts=$(grep ' passed, ' "$P/log" | paste -s -d ';' | sed 's/;/; /g')
        echo "ok      $name${counts:+: $counts} ($cost)"
        echo ok >"$P/result"
        find "$P" -type f ! -name result ! -name name ! -name log -delete
    else # in one write: another cell may print at the same time
        echo "FAILED  $name ($cost)
$(head -c 20000 "$P/log" | sed 's/^/        /')"
        echo failed >"$P/result"
    fi
}

run_limited() { # a function, for $LIMIT seconds at most if there is a limit
    [ -n "$LIMIT" ] || {
        "$@"
        return
    }
    local function status=0 watch
    set -m # a process group of its own, which the watch ends as a whole
    "$@" &
    function=$!
    { sleep "$LIMIT" && echo "ended after $LIMIT seconds" && kill -- "-$function"; } &
    watch=$!
    wait "$function" || status=$?
    kill -- "-$watch" 2>/dev/null
    wait "$watch" 2>/dev/null
    return $status
}

collect() { # waits for all cells, counts them
    local P
    wait
    for P in "${places[@]}"; do
        if [ "$(cat "$P/result" 2>/dev/null)" = ok ]; then
            passed=$((passed + 1))
        else
            failed=$((failed + 1))
            failures+=("$(cat "$P/name")")
        fi
    done
    places=()
}

finish() { # finish LEAST: the last lines and the status; without names, at least so many cells must have run
    echo "$((SECONDS / 60)) min $((SECONDS % 60)) s, $n_cells cells"
    if [ ${#missing[@]} -gt 0 ]; then
        printf 'not run: %s\n' "${missing[@]}"
        [ -z "$STRICT" ] || failed=$((failed + ${#missing[@]}))
    fi
    if [ ${#only[@]} = 0 ] && [ $((n_cells + ${#missing[@]})) -lt "$1" ]; then
        echo "failed: $((n_cells + ${#missing[@]})) cells are listed, and there must be $1 at least"
        failed=$((failed + 1))
    fi
    if [ ${#only[@]} -gt 0 ] && [ $((n_cells + ${#missing[@]})) = 0 ]; then
        echo "failed: no cell has one of these in its name: ${only[*]}"
        failed=$((failed + 1))
    fi
    [ ${#failures[@]} = 0 ] || printf 'failed: %s\n' "${failures[@]}"
    echo "$passed passed, $failed failed"
    [ $failed = 0 ]
}
