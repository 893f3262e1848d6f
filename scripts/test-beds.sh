#!/bin/bash
# SPDX-License-Identifier: Apache-2.0
# test-beds.sh [NAME...]: runs the long tests that `make test` leaves out: all, or those whose line contains a NAME.
#
# Each line of the list has a package, a test of it and further words for the test. The script runs the ignored cases of the
# test and prints cargo's output; a summary with one line per test bed follows at the end. A failed test bed runs once more,
# and its line says so: emulated VMs wait for minutes if the host is busy. A word before the package says more:
#
#   ~        the emulated PC of this test bed counts instructions: it needs one core, and its clock does not depend on what
#            else runs. These run one after the other on core 0 at lower priority, beside the other test beds.
#   =        its daemon manages both cores of this host: it runs after all others.
#   -        it runs only if it is named.
#
# VIOLA_BEDS_END (seconds since 1970, as in `date +%s`) is when all must have ended: a failed test bed runs once more only if it
# can end before.
set -uo pipefail
cd "$(dirname "$0")/.." || exit 2

beds() {
    cat <<'BEDS'
~ viola qemu_scx
~ viola qemu_operator
viola-lab qemu
viola qemu_vread
viola qemu_migration
viola qemu_stream
viola qemu_pipe
viola-vpipe vlan vms_of_equal
- viola qemu_ack
viola qemu_turbo
viola qemu_lanes vfs_follow guests_survive
viola crash_points
viola trial
viola vread_safety
viola-agent datanode
viola vread_hdfs
viola-lab hdfs
viola pipe
viola pipe-soak
viola-lab smp
= viola turbo
- viola qemu_lanes a_nested
BEDS
}

names=("$@")
wanted() {
    local name
    [ ${#names[@]} -gt 0 ] || return 0
    for name in "${names[@]}"; do case $1 in *"$name"*) return 0 ;; esac; done
    return 1
}

# choose beside|main|last: the lines that run in this stream: package, test, further words.
choose() {
    local line stream
    while read -r line; do
        stream=main
        case $line in
            '= '*) stream=last line=${line#'= '} ;;
            '~ '*) stream=beside line=${line#'~ '} ;;
            '- '*)
                line=${line#- }
                [ ${#names[@]} -gt 0 ] || continue
                ;;
        esac
        [ "$stream" = "$1" ] && wanted "$line" && echo "$line"
    done < <(beds)
}

# Makes what only this test bed needs; of what `prepare_early` makes it waits for the end.
prepare() {
    case $1 in
    *qemu_ack*) scripts/guest-kmod.sh --headers ;;
    *qemu_operator*) flock "$work/packages" sh -c 'scripts/debian-image.sh && scripts/deb.sh' ;;
    'viola-lab smp' | 'viola turbo') scripts/uml-smp.sh ;;
    esac
}

# Makes what takes long: packages, and a kernel with several CPUs, which takes up to 15 minutes.
prepare_early() {
    local name
    renice -n 19 "$BASHPID" >/dev/null
    for name in 'viola qemu_operator' 'viola turbo'; do
        ! grep -qxF "$name" <<<"$all" || prepare "$name"
    done
}

# Whether what takes $1 seconds can still end in time.
time_for() {
    [ -z "${VIOLA_BEDS_END-}" ] || [ $((VIOLA_BEDS_END - EPOCHSECONDS)) -ge "$1" ]
}

# Runs the test beds in a file as `choose` prints them, one after the other. Writes a line for each to a summary.
run_all() {
    local package bed more begin result name
    while read -r package bed more; do
        name="$package $bed${more:+ $more}"
        begin=$SECONDS
        if ! prepare "$name"; then
            printf '%-44s FAILED in %d s: what it needs cannot be made\n' "$name" $((SECONDS - begin)) >>"$2"
            continue
        fi
        for result in passed 'passed at the second try' FAILED; do
            [ "$result" != FAILED ] || break
            echo "== $name"
            # shellcheck disable=SC2086 # further words are words
            cargo test -p "$package" --test "$bed" -- --ignored --test-threads 1 $more </dev/null && break
            time_for $((SECONDS - begin)) || { result=FAILED; break; }
        done
        printf '%-44s %s in %d s\n' "$name" "$result" $((SECONDS - begin)) >>"$2"
    done <"$1"
}

work=$(mktemp -d)
other= early=
# Both are process groups of their own.
trap 'rm -rf "$work"; for group in $other $early; do kill -- "-$group" 2>/dev/null; done' EXIT
trap 'exit 130' INT TERM
for stream in beside main last; do
    choose $stream >"$work/$stream"
done
all=$(cat "$work/beside" "$work/main" "$work/last")
[ -n "$all" ] || { echo "test-beds: no test bed is called ${names[*]}" >&2; exit 2; }

set -m
prepare_early >"$work/early" 2>&1 &
early=$!
if [ -s "$work/beside" ]; then
    (
        renice -n 5 "$BASHPID" >/dev/null
        run_all "$work/beside" "$work/summary.beside"
    ) >"$work/output" 2>&1 &
    other=$!
fi
set +m
run_all "$work/main" "$work/summary.main"
if [ -n "$other" ]; then
    [ ! -s "$work/main" ] || echo "== the test beds on core 0"
    tail -n +1 -f --pid="$other" "$work/output"
    wait "$other"
    other=
fi
run_all "$work/last" "$work/summary.other"
echo
cat "$work"/summary.*
count() { cat "$work"/summary.* | grep -c "$1"; }
failed=$(count ' FAILED in ')
echo "test beds: $(count ' passed ') passed, $failed failed"
[ "$failed" -eq 0 ]
