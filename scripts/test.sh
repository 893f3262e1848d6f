#!/bin/bash
# SPDX-License-Identifier: Apache-2.0
# test.sh [CARGO ARGUMENTS...]: all tests of the workspace, or those of a `cargo test` with these arguments.
#
# Unit, property and documentation tests run on core 0 at low priority, beside the tests of guests, networks and daemons. Their
# output is printed when both are done. A test binary of guests, networks or daemons that fails is run once more by itself, and
# named at the end: real kernels on a busy machine are late now and then. Unit and property tests have one try.
set -uo pipefail
cd "$(dirname "$0")/.."

# Random cases follow from the sources: the same sources are tested by the same cases, others by others.
PROPTEST_RNG_SEED=${PROPTEST_RNG_SEED:-$((16#$(find crates -name '*.rs' -print0 | LC_ALL=C sort -z | xargs -0 cat | sha256sum | cut -c1-15)))}
export PROPTEST_RNG_SEED
echo "test: random cases by PROPTEST_RNG_SEED=$PROPTEST_RNG_SEED"

log=$(mktemp)
beside=$(mktemp)
unit=
trap 'rm -f "$log" "$beside"; [ -z "$unit" ] || kill "$unit" 2>/dev/null' EXIT

# The ten test binaries that took longest, from cargo's own lines.
longest() {
    echo "test: the longest:"
    for file in "$log" "$beside"; do
        sed -n 's/^ *Running \(unittests \)\{0,1\}\([^ ]*\) (.*deps\/\([a-z0-9_-]*\)-[0-9a-f]*)$/\3 \2/p; s/.*finished in \([0-9.]*\)s$/= \1/p' "$file" |
            awk '$1 == "=" { if (name != "") print $2, name; name = ""; next } { name = $0 }'
    done | sort -rn | head -10 | awk '{ printf "%7.1f s  %s\n", $1, substr($0, length($1) + 2) }'
}

# The tests that need no guest, network or daemon. All commands name all packages: others would be built with other features.
unit_tests() {
    cargo test --workspace --no-fail-fast --lib --bins &&
        cargo test --workspace --no-fail-fast --doc
}

if [ $# -gt 0 ]; then
    cargo test --workspace --no-fail-fast "$@" 2>&1 | tee "$log"
    status=${PIPESTATUS[0]}
else
    # One build for both; a cargo that builds holds up the other one.
    cargo test --workspace --no-run || exit 1
    (
        renice -n 15 "$BASHPID" >/dev/null
        taskset -cp 0 "$BASHPID" >/dev/null
        unit_tests
    ) >"$beside" 2>&1 &
    unit=$!
    cargo test --workspace --no-fail-fast --test '*' 2>&1 | tee "$log"
    status=${PIPESTATUS[0]}
    wait "$unit"
    unit_done=$?
    unit=
    echo "== unit, property and documentation tests"
    cat "$beside"
    [ $unit_done -eq 0 ] || { longest; echo "test: unit tests failed" >&2; exit 1; }
fi
longest
[ "$status" -ne 0 ] || exit 0

# cargo names them at the end: `-p viola-agent --test relay`
mapfile -t failed < <(sed -n 's/^ *`\(-p [a-z0-9-]* --[a-z]*[a-z0-9_ -]*\)`$/\1/p' "$log")
[ ${#failed[@]} -gt 0 ] || exit 1
late=()
for target in "${failed[@]}"; do
    case $target in
    *" --test "*) ;;
    *) echo "test: failed: $target" >&2; exit 1 ;;
    esac
    echo "== $target, once more"
    # shellcheck disable=SC2086 # several words
    cargo test $target || { echo "test: failed twice: $target" >&2; exit 1; }
    late+=("$target")
done
printf 'test: passed at the second try only: %s\n' "${late[@]}"
