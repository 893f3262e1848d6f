#!/bin/bash
# SPDX-License-Identifier: Apache-2.0
# test-beds.sh [NAME...]: the long tests, which `make test` leaves out; all, or those whose line contains a NAME.
# What begins with - is run by its name only.
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
- viola qemu_lanes
- viola qemu_operator
- viola qemu_ack
viola qemu_turbo
viola vread_safety
viola-agent datanode
viola vread_hdfs
viola-lab smp
viola turbo
viola pipe
viola pipe-soak
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

names=("$@")
summary=() failed=0
while read -r package bed more; do
    if [ "$package" = - ]; then
        [ ${#names[@]} -gt 0 ] || continue
        read -r package bed more <<<"$bed $more"
    fi
    [ ${#names[@]} -eq 0 ] || wanted "$package $bed $more" || continue
    echo "== $package $bed $more"
    begin=$SECONDS
    if run; then
        result=passed
    elif echo "== $package $bed $more, once more" && run; then
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
echo "test beds: $((${#summary[@]} - failed)) passed, $failed failed"
[ $failed -eq 0 ]
