#!/bin/bash
# SPDX-License-Identifier: Apache-2.0
# test-beds.sh [NAME...]: the long tests, which `make test` leaves out; all, or those whose line contains a NAME.
# What begins with - is run by its name only; what begins with + and its usual seconds, where there is time for it:
# VIOLA_BEDS_END, when all has to be over (seconds since 1970, as `date +%s` has them), else always. What is left out is said.
#
# Each line is a package and a test of it, of which the ignored cases are run, one after the other; further words go to the
# test itself. cargo test's own words are shown; at the end there is one line for each test bed. One that fails is run once
# more, and the line says so: emulated machines wait for minutes where this one is busy with others.
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

# What only one bed needs is made when it comes to that.
prepare() {
    case $bed in
        qemu_ack) scripts/guest-kmod.sh ;;
        qemu_operator) scripts/debian-image.sh && scripts/deb.sh ;;
    esac
}

# Whether a bed that takes $1 seconds can still be over in time; those that take 0 are run in any case.
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
