#!/bin/bash
# SPDX-License-Identifier: Apache-2.0
# same-build.sh: builds the program viola twice, from an empty folder each time, and compares the two byte by byte.
#
# Both builds run in the same place: the program names files of its libraries by their path. Takes six to eleven minutes on two cores.
set -euo pipefail
cd "$(dirname "$0")/.."

work=build/same
rm -rf "$work"
mkdir -p "$work"
for build in first second; do
    echo "same-build: $build build"
    CARGO_TARGET_DIR=$work/target cargo build --quiet --locked --release -p viola
    mv "$work/target/release/viola" "$work/$build"
    rm -rf "$work/target"
done
(cd "$work" && sha256sum first second)
if ! cmp "$work/first" "$work/second"; then
    echo "same-build: the two builds differ; both are in $work" >&2
    exit 1
fi
echo "same-build: the two builds are equal"
rm -rf "$work"
