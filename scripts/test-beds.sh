#!/bin/bash
# SPDX-License-Identifier: Apache-2.0
# test-beds.sh [NAME...]: runs the long tests that `make test` leaves out: all, or those whose line contains a NAME.
# A line that begins with - runs only if it is named. A line that begins with + and its usual seconds runs only if it can
# end before VIOLA_BEDS_END (seconds since 1970, as in `date +%s`), if that is set. The script lists what it left out.
#
# Each line has a package, a test of it and further words for the test. The script runs the ignored cases of the test one
# after the other and prints cargo's output; a summary with one line per test bed follows. A failed test bed runs once
# more, and its line says so: emulated VMs wait for minutes if the host is busy.
set -uo pipefail
cd "$(dirname "$0")/.." || exit 2

beds() {
    cat <<'BEDS'
viola-lab qemu
viola qemu_vread
viola qemu_migration
viola qemu_stream
viola qemu_pipe
viola-vpipe vlan vms_of_equal
viola qemu_scx
- viola qemu_ack
viola qemu_turbo
viola crash_points
viola vread_safety
viola-agent datanode
viola vread_hdfs
viola-lab smp
viola turbo
viola pipe
viola pipe-soak
+ 1200 viola qemu_operator
+ 2000 viola qemu_lanes
BEDS
}

wanted() {
    local name
    for name in "${names[@]}"; do case $1 in *"$name"*) return 0 ;; esac; done
    return 1
}

run() {
    # shellcheck disable=SC2086 # further words are words
    cargo test -p "$package" --test "$bed" -- --ignored --test-threads 1 $more </dev/null
}

# Makes what only one bed needs, just before that bed.
prepare() {
    case $bed in
        qemu_ack) scripts/guest-kmod.sh ;;
        qemu_operator) scripts/debian-image.sh && scripts/deb.sh ;;
    esac
}

# Whether a bed that takes $1 seconds can still end in time; 0 means always.
time_for() {
    [ "$1" -eq 0 ] || [ -z "${VIOLA_BEDS_END-}" ] || [ $((VIOLA_BEDS_END - EPOCHSECONDS)) -ge "$1" ]
}

names=("$@")
summary=() failed=0 left_out=0
while read -r package bed more; do
    usual=0
    if [ "$package" = - ]; then
        [ ${#names[@]} -gt 0 ] || continue
        read -r package bed more <<<"$bed $more"
    elif [ "$package" = + ]; then
        usual=$bed
        read -r package bed more <<<"$more"
    fi
    [ ${#names[@]} -eq 0 ] || wanted "$package $bed $more" || continue
    if ! time_for "$usual"; then
        summary+=("$(printf '%-10s %-20s left out: it takes %d s, and %d are left' "$package" "$bed" "$usual" $((VIOLA_BEDS_END - EPOCHSECONDS)))")
        left_out=$((left_out + 1))
        continue
    fi
    echo "== $package $bed $more"
    begin=$SECONDS
    if prepare </dev/null && run; then
        result=passed
    elif time_for "$usual" && echo "== $package $bed $more, once more" && prepare </dev/null && run; then
        result='passed at the second try'
    else
        result=FAILED
        failed=$((failed + 1))
    fi
    summary+=("$(printf '%-10s %-20s %s in %d s' "$package" "$bed" "$result" $((SECONDS - begin)))")
done < <(beds)
[ ${#summary[@]} -gt 0 ] || { echo "test-beds: no test bed is called ${names[*]}" >&2; exit 2; }
echo
printf '%s\n' "${summary[@]}"
echo "test beds: $((${#summary[@]} - failed - left_out)) passed, $failed failed$([ $left_out -eq 0 ] || echo ", $left_out left out")"
[ $failed -eq 0 ]
