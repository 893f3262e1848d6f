#!/bin/bash
# SPDX-License-Identifier: Apache-2.0
# miri.sh [FILTER]: runs the unit tests of the crates that read foreign bytes, or decide, under Miri, which finds undefined behaviour.
#
# Installs the nightly toolchain with Miri if it is missing. Miri is some hundred times slower than a test: property tests run with few
# cases, and a test gets TEST_SECONDS (120). Those that need longer, or a system call that Miri does not know, are named at the end;
# they are no failure.
set -euo pipefail
cd "$(dirname "$0")/.."

if ! cargo +nightly miri --version >/dev/null 2>&1; then
    echo "miri: installing the nightly toolchain with Miri"
    rustup toolchain install nightly --profile minimal --component miri,rust-src
fi
# files and the clock of the host: tests read examples from the repository
export MIRIFLAGS=-Zmiri-disable-isolation PROPTEST_CASES=${PROPTEST_CASES:-2} CARGO_TARGET_DIR=${CARGO_TARGET_DIR:-target}/miri
export seconds=${TEST_SECONDS:-120} results
results=$(mktemp -d)
trap 'rm -rf "$results"' EXIT

# run PACKAGE TEST: a file of the test's output, named after how it ended
run() {
    local output=$results/$1.${2//:/_} status=0
    timeout -s KILL "$seconds" cargo +nightly miri test --quiet --locked -p "$1" --lib -- --exact "$2" >"$output" 2>&1 || status=$?
    case $status in
        0) mv "$output" "$output.passed" ;;
        124 | 137) mv "$output" "$output.unfinished" ;;
        *)
            if grep -q '^error: unsupported operation: ' "$output"; then
                mv "$output" "$output.unsupported"
            else
                echo "miri: $1 $2 failed:" && cat "$output" && mv "$output" "$output.failed"
            fi
            ;;
    esac
}
export -f run

for package in viola-proto viola-extents viola-policy; do
    tests=$(cargo +nightly miri test --quiet --locked -p "$package" --lib -- --list | sed -n 's/: test$//p' | grep -F -- "${1:-}" || true)
    echo "miri: $package, $(wc -w <<<"$tests") tests"
    xargs -r -P "$(nproc)" -I{} bash -c "run $package {}" <<<"$tests"
done
count() {
    find "$results" -name "*.$1" | wc -l
}
# name ENDING TEXT: names the tests that ended so
name() {
    local file
    for file in "$results"/*."$1"; do
        [ ! -e "$file" ] || echo "miri: $2: $(basename "$file" ".$1")"
    done
}
name unfinished "not finished in $seconds s"
name unsupported "needs a system call that Miri does not know"
echo "miri: $(count passed) tests passed, $(count failed) failed, $(count unfinished) not finished, $(count unsupported) not for Miri"
[ "$(count passed)" -gt 0 ] && [ "$(count failed)" -eq 0 ]
