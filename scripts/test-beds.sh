#!/bin/bash
# SPDX-License-Identifier: Apache-2.0
# test-beds.sh [NAME...]: runs the long tests that `make test` leaves out: all, or those whose line contains a NAME.
#
# Each line of the list has a package, a test of it and further words for the test. The script runs the ignored cases of the
# test and prints cargo's output; a summary with one line per test bed follows at the end. A failed test bed runs once more,
# and its line says so: emulated VMs wait for minutes if the host is busy. A word before the package says more:
#
#   ~        the emulated PC of this test bed counts instructions: it needs one core, and its clock does not depend on what
#            else runs. These run one after the other on core 0 at lower priority, beside the other test beds. Once those are
#            done, core 1 takes its part of what is left, from the end of the list.
#   =        its daemon manages both cores of this host: it runs after all others.
#   -        it runs only if it is named.
#
# VIOLA_BEDS_END (seconds since 1970, as in `date +%s`) is when all must have ended: a failed test bed runs once more only if it
# can end before.
set -uo pipefail
cd "$(dirname "$0")/.." || exit 2

beds() {
    cat <<'BEDS'
~ viola qemu_scx daemon::
~ viola qemu_operator
~ viola qemu_scx daemon_turbo::
~ viola qemu_scx turbo::interrupts
~ viola qemu_scx turbo::turbo_cores
~ viola qemu_scx mechanism::the_latency
~ viola qemu_scx mechanism::however
~ viola qemu_scx mechanism::the_accounting
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
- viola qemu_kvm
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
    *qemu_kvm*)
        flock "$work/packages" scripts/debian-image.sh &&
            scripts/build.sh build --locked --release -p viola -p viola-bench --no-default-features
        ;;
    *qemu_operator* | *qemu_pipe*) flock "$work/packages" sh -c 'scripts/debian-image.sh && scripts/deb.sh' ;;
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

# run_bed LINE SUMMARY: runs one test bed, and adds its line to the summary.
run_bed() {
    local package bed more begin=$SECONDS result name cases
    read -r package bed more <<<"$1"
    name="$package $bed${more:+ $more}"
    if ! prepare "$name" </dev/null; then
        printf '%-44s FAILED in %d s: what it needs cannot be made\n' "$name" $((SECONDS - begin)) >>"$2"
        return
    fi
    # shellcheck disable=SC2086 # further words are words
    cases=$(cargo test -q --workspace --test "$bed" -- --list --ignored $more </dev/null)
    if [ -z "${cases//[!:]/}" ]; then
        printf '%-44s FAILED in %d s: it cannot be built, or has no such case\n' "$name" $((SECONDS - begin)) >>"$2"
        return
    fi
    for result in passed 'passed at the second try' FAILED; do
        [ "$result" != FAILED ] || break
        echo "== $name"
        # The whole workspace, so that nothing is built again with other features: of this name only one package has such cases.
        # shellcheck disable=SC2086 # further words are words
        cargo test --workspace --test "$bed" -- --ignored --test-threads 1 $more </dev/null && break
        time_for $((SECONDS - begin)) || { result=FAILED; break; }
    done
    printf '%-44s %s in %d s\n' "$name" "$result" $((SECONDS - begin)) >>"$2"
}

# run_all SUMMARY: runs those test beds of its input, lines as `choose` prints them, that no other stream has claimed.
run_all() {
    local line
    while read -r line; do
        ! mkdir "$work/claimed/${line// /.}" 2>/dev/null || run_bed "$line" "$1"
    done
}

work=$(mktemp -d)
mkdir "$work/claimed"
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
        run_all "$work/summary.beside" <"$work/beside"
    ) >"$work/output" 2>&1 &
    other=$!
fi
set +m
run_all "$work/summary.main" <"$work/main"
VIOLA_BEDS_CORE=1 run_all "$work/summary.main" < <(tac "$work/beside")
if [ -n "$other" ]; then
    [ ! -s "$work/main" ] || echo "== the test beds on core 0"
    tail -n +1 -f --pid="$other" "$work/output"
    wait "$other"
    other=
fi
run_all "$work/summary.other" <"$work/last"
echo
cat "$work"/summary.*
count() { cat "$work"/summary.* | grep -c "$1"; }
failed=$(count ' FAILED in ')
lost=$(($(grep -c . <<<"$all") - $(cat "$work"/summary.* | wc -l)))
[ "$lost" -eq 0 ] || echo "test beds: $lost have no result"
echo "test beds: $(count ' passed ') passed, $failed failed"
[ "$failed" -eq 0 ] && [ "$lost" -eq 0 ]
