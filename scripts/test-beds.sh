#!/bin/bash
# SPDX-License-Identifier: Apache-2.0
# test-beds.sh [NAME...]: runs the long tests that `make test` leaves out: all, or those whose line contains a NAME.
#
# Each line of the list has a package, a test of it and further words for the test. The script runs the ignored cases of the
# test and prints cargo's output; a summary with one line per test bed follows at the end. A failed test bed runs once more,
# and its line says so: emulated VMs wait for minutes if the host is busy. A word before the package says more:
#
#   ~        the emulated PC of this test bed counts instructions: it needs one core, and its clock does not depend on what
#            else runs. These run one after the other on core 0 at low priority, beside other emulated PCs.
#   =        its daemon or its guests share this host's cores: it runs when no emulated PC runs.
#   + N      it takes N seconds as a rule, and runs only if it can end before VIOLA_BEDS_END (seconds since 1970, as in
#            `date +%s`), if that is set. The summary lists what was left out.
#   -        it runs only if it is named.
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
= viola crash_points
= viola vread_safety
= viola-agent datanode
= viola vread_hdfs
= viola-lab smp
= viola turbo
= viola pipe
= viola pipe-soak
= + 1300 viola qemu_lanes a_nested
BEDS
}

names=("$@")
wanted() {
    local name
    [ ${#names[@]} -gt 0 ] || return 0
    for name in "${names[@]}"; do case $1 in *"$name"*) return 0 ;; esac; done
    return 1
}

# choose beside|main|after: the lines that run in this stream: the usual seconds (0: none stated), package, test, further words.
choose() {
    local line stream usual
    while read -r line; do
        stream=main usual=0
        case $line in
            '~ '*) stream=beside line=${line#'~ '} ;;
            '= '*) stream=after line=${line#'= '} ;;
        esac
        case $line in
            '+ '*) read -r _ usual line <<<"$line" ;;
            '- '*)
                line=${line#- }
                [ ${#names[@]} -gt 0 ] || continue
                ;;
        esac
        [ "$stream" = "$1" ] && wanted "$line" && echo "$usual $line"
    done < <(beds)
}

# Makes what only some test beds need.
prepare() {
    case $1 in *qemu_ack*) scripts/guest-kmod.sh --headers || return 1 ;; esac
    case $1 in *qemu_operator*) scripts/debian-image.sh && scripts/deb.sh || return 1 ;; esac
}

# Whether a bed that takes $1 seconds can still end in time; 0 means always.
time_for() {
    [ "$1" -eq 0 ] || [ -z "${VIOLA_BEDS_END-}" ] || [ $((VIOLA_BEDS_END - EPOCHSECONDS)) -ge "$1" ]
}

# Runs the test beds in a file as `choose` prints them, one after the other. Writes a line for each to a summary.
run_all() {
    local usual package bed more begin result name
    while read -r usual package bed more; do
        name="$package $bed${more:+ $more}"
        if ! time_for "$usual"; then
            printf '%-44s left out: it takes %d s, and %d are left\n' "$name" "$usual" $((VIOLA_BEDS_END - EPOCHSECONDS)) >>"$2"
            continue
        fi
        begin=$SECONDS
        for result in passed 'passed at the second try' FAILED; do
            [ "$result" != FAILED ] || break
            echo "== $name"
            # shellcheck disable=SC2086 # further words are words
            cargo test -p "$package" --test "$bed" -- --ignored --test-threads 1 $more </dev/null && break
            time_for "$usual" || { result=FAILED; break; }
        done
        printf '%-44s %s in %d s\n' "$name" "$result" $((SECONDS - begin)) >>"$2"
    done <"$1"
}

work=$(mktemp -d)
other=
# The other stream is a process group of its own.
trap 'rm -rf "$work"; [ -z "$other" ] || kill -- "-$other" 2>/dev/null' EXIT
trap 'exit 130' INT TERM
for stream in beside main after; do
    choose $stream >"$work/$stream"
done
all=$(cat "$work/beside" "$work/main" "$work/after")
[ -n "$all" ] || { echo "test-beds: no test bed is called ${names[*]}" >&2; exit 2; }
prepare "$all" || { echo "test-beds: what a test bed needs cannot be made" >&2; exit 1; }

if [ -s "$work/beside" ]; then
    set -m
    (
        renice -n 10 "$BASHPID" >/dev/null
        run_all "$work/beside" "$work/summary.beside"
    ) >"$work/output" 2>&1 &
    other=$!
    set +m
fi
run_all "$work/main" "$work/summary.main"
if [ -n "$other" ]; then
    [ ! -s "$work/main" ] || echo "== the test beds on core 0"
    tail -n +1 -f --pid="$other" "$work/output"
    wait "$other"
    other=
fi
run_all "$work/after" "$work/summary.other"
echo
cat "$work"/summary.*
count() { cat "$work"/summary.* | grep -c "$1"; }
failed=$(count ' FAILED in ') left_out=$(count ' left out: ')
echo "test beds: $(count ' passed ') passed, $failed failed$([ "$left_out" -eq 0 ] || echo ", $left_out left out")"
[ "$failed" -eq 0 ]
