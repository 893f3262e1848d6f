#!/bin/bash
# SPDX-License-Identifier: Apache-2.0
# miri.sh: runs the unit tests of the crates that read foreign bytes, or decide, under Miri, which finds undefined behaviour.
#
# Installs the nightly toolchain with Miri if it is missing. Property tests run with few cases: Miri is some hundred times slower.
set -euo pipefail
cd "$(dirname "$0")/.."

if ! cargo +nightly miri --version >/dev/null 2>&1; then
    echo "miri: installing the nightly toolchain with Miri"
    rustup toolchain install nightly --profile minimal --component miri,rust-src
fi
# files and the clock of the host: tests read examples from the repository
export MIRIFLAGS=-Zmiri-disable-isolation PROPTEST_CASES=${PROPTEST_CASES:-2} CARGO_TARGET_DIR=${CARGO_TARGET_DIR:-target}/miri
for package in viola-proto viola-extents viola-policy; do
    echo "miri: $package"
    cargo +nightly miri test --quiet --locked -p "$package" --lib
done
