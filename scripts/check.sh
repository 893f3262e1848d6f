#!/bin/bash
# SPDX-License-Identifier: Apache-2.0
# check.sh: what to run before each commit: formatting, and clippy and unit tests of the crates that changed.
#
# Changed is what differs from the main branch (VIOLA_CHECK_BASE names another revision), committed or not. Tests that
# boot guests are left to `make test`.
set -euo pipefail
cd "$(dirname "$0")/.."

base=$(git merge-base HEAD "${VIOLA_CHECK_BASE:-main}" 2>/dev/null || git rev-parse HEAD)
cargo fmt --all --check
mapfile -t folders < <({ git diff --name-only "$base"; git ls-files --others --exclude-standard; } |
    sed -n 's#^\(crates/[^/]*\)/.*#\1#p' | sort -u)
packages=()
for folder in "${folders[@]}"; do
    [ -e "$folder/Cargo.toml" ] || continue # the crate is gone
    packages+=(-p "$(sed -n 's/^name = "\(.*\)"/\1/p' "$folder/Cargo.toml" | head -1)")
done
if [ ${#packages[@]} -eq 0 ]; then
    echo "check: no crate differs from ${base:0:10}"
    exit 0
fi
echo "check: ${packages[*]}"
cargo clippy --quiet "${packages[@]}" --all-targets -- -D warnings
cargo test --quiet "${packages[@]}" --lib --bins
