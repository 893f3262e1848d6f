#!/bin/bash
# SPDX-License-Identifier: Apache-2.0
# All tests of the workspace. A test binary of guests, networks or daemons that fails is run once more by itself, and named at the end:
# real kernels on a busy machine are late now and then. Unit and property tests have one try.
set -uo pipefail
cd "$(dirname "$0")/.."

# Random cases follow from the sources: the same sources are tested by the same cases, others by others.
PROPTEST_RNG_SEED=${PROPTEST_RNG_SEED:-$((16#$(find crates -name '*.rs' -print0 | LC_ALL=C sort -z | xargs -0 cat | sha256sum | cut -c1-15)))}
export PROPTEST_RNG_SEED
echo "test: random cases by PROPTEST_RNG_SEED=$PROPTEST_RNG_SEED"

log=$(mktemp)
trap 'rm -f "$log"' EXIT

# The ten test binaries that took longest, from cargo's own lines.
longest() {
    echo "test: the longest:"
    sed -n 's/^ *Running \(unittests \)\{0,1\}\([^ ]*\) (.*deps\/\([a-z0-9_-]*\)-[0-9a-f]*)$/\3 \2/p; s/.*finished in \([0-9.]*\)s$/= \1/p' "$log" |
        awk '$1 == "=" { if (name != "") print $2, name; name = ""; next } { name = $0 }' |
        sort -rn | head -10 | awk '{ printf "%7.1f s  %s\n", $1, substr($0, length($1) + 2) }'
}

cargo test --workspace --no-fail-fast "$@" 2>&1 | tee "$log" && { longest; exit 0; }
longest

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
