#!/bin/bash
# SPDX-License-Identifier: Apache-2.0
# test-beds.sh [NAME...]: runs the long tests that `make test` leaves out: all, or those whose line contains a NAME.
#
# Each line of the list has the seconds that the test bed usually takes, a package, a test of it and further words for the test.
# The script runs the ignored cases of the test and prints cargo's output; a summary with one line per test bed follows at the
# end. A failed test bed runs once more, and its line says so: emulated VMs wait for minutes if the host is busy. A word at the
# begin of the line says more:
#
#   ~        the emulated PC of this test bed counts instructions: it needs one core, and its clock does not depend on what
#            else runs. These run one after the other on core 0 at lower priority, beside the other test beds. Once those are
#            done, core 1 takes its part of what is left, from the end of the list.
#   =        it runs after all others: its daemon manages both cores of this host, or its kernel takes long to compile.
#   -        it runs only if it is named.
#
# VIOLA_BEDS_END (seconds since 1970, as in `date +%s`) is when all must have ended. What usually takes longer than is left is
# left out, with a line in the summary, and a failed test bed runs once more only if it can end before.
set -uo pipefail
cd "$(dirname "$0")/.." || exit 2

# What needs the packages comes when they are made. The longest comes as early as that allows, since core 1 takes the rest.
beds() {
    cat <<'BEDS'
~ 390 viola qemu_scx daemon::
~ 1500 viola qemu_operator
~ 240 viola qemu_scx daemon_turbo::
~ 200 viola qemu_scx turbo::interrupts
~ 200 viola qemu_scx turbo::turbo_cores
~ 200 viola qemu_scx mechanism::the_latency
~ 200 viola qemu_scx mechanism::however
~ 60 viola qemu_scx mechanism::the_accounting
80 viola-lab qemu
220 viola qemu_vread
100 viola qemu_migration
70 viola qemu_stream
20 viola-vpipe vlan vms_of_equal
20 viola-vpipe outbound libvirts_limit
- 300 viola qemu_ack
120 viola qemu_turbo
310 viola qemu_lanes vfs_follow guests_survive
60 viola crash_points
400 viola trial
540 viola vread_safety
120 viola-agent datanode
120 viola vread_hdfs
110 viola-lab hdfs
10 viola pipe
120 viola pipe-soak
140 viola qemu_pipe
= 60 viola-lab smp
= 120 viola turbo
- 1500 viola qemu_lanes a_nested
- 1200 viola qemu_kvm
BEDS
}

names=("$@")
wanted() {
    local name
    [ ${#names[@]} -gt 0 ] || return 0
    for name in "${names[@]}"; do case $1 in *"$name"*) return 0 ;; esac; done
    return 1
}

# choose beside|main|last: the lines that run in this stream: seconds, package, test, further words.
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
    *qemu_operator* | *qemu_pipe*)
        # Once in a run: a look at the packages alone takes half a minute.
        (
            flock 8
            [ -e "$work/packages.made" ] || { scripts/debian-image.sh && scripts/deb.sh --debug && touch "$work/packages.made"; }
        ) 8>"$work/packages"
        ;;
    'viola-lab smp' | 'viola turbo') scripts/uml-smp.sh ;;
    esac
}

# Makes what takes long: packages, and a kernel with several CPUs, which takes up to 15 minutes.
prepare_early() {
    local name
    renice -n 19 "$BASHPID" >/dev/null
    for name in 'viola qemu_operator' 'viola turbo'; do
        ! grep -qE "^[0-9]+ $name\$" <<<"$all" || prepare "$name"
    done
}

# How long the test beds that run after all others take, while those run.
reserved=0
# Whether what takes $1 seconds can still end in time.
time_for() {
    [ -z "${VIOLA_BEDS_END-}" ] || [ $((VIOLA_BEDS_END - EPOCHSECONDS)) -ge "$1" ]
}

# run_bed LINE SUMMARY: runs one test bed, and adds its line to the summary.
run_bed() {
    local usual package bed more begin=$SECONDS result name cases
    read -r usual package bed more <<<"$1"
    name="$package $bed${more:+ $more}"
    if ! time_for $((usual + reserved)); then
        printf '%-44s LEFT OUT: %d s are too long for what is left\n' "$name" "$usual" >>"$2"
        return
    fi
    case $name in
    'viola-lab smp' | 'viola turbo')
        # Their kernel may be in the making, for minutes more.
        while time_for "$usual" && kill -0 "$early" 2>/dev/null; do sleep 2; done
        if ! time_for "$usual"; then
            printf '%-44s LEFT OUT: its kernel was not made in time\n' "$name" >>"$2"
            return
        fi
        ;;
    esac
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
        time_for $((SECONDS - begin + reserved)) || { result=FAILED; break; }
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

reserved=$(awk '{ sum += $1 } END { print sum + 0 }' "$work/last")
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
reserved=0
run_all "$work/summary.other" <"$work/last"
echo
cat "$work"/summary.*
count() { cat "$work"/summary.* | grep -c "$1"; }
failed=$(count ' FAILED in ')
lost=$(($(grep -c . <<<"$all") - $(cat "$work"/summary.* | wc -l)))
[ "$lost" -eq 0 ] || echo "test beds: $lost have no result"
left_out=$(count ' LEFT OUT: ')
echo "test beds: $(count ' passed ') passed, $failed failed$([ "$left_out" -eq 0 ] || echo ", $left_out left out for lack of time")"
[ "$failed" -eq 0 ] && [ "$lost" -eq 0 ]
