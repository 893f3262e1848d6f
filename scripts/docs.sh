#!/bin/bash
# SPDX-License-Identifier: Apache-2.0
# docs.sh: the book in build/book, and the documentation of the crates in build/book/api.
#
# mdBook is installed into build/docs/tool. A warning of rustdoc is an error, and so is a page of results that differs
# from its JSON file.
set -euo pipefail
cd "$(dirname "$0")/.."

tool_version=0.5.4
tool=build/docs/tool/bin/mdbook
scripts/results-pages.py --check
if [ "$("$tool" --version 2>/dev/null)" != "mdbook v$tool_version" ]; then
    echo "docs: installing mdbook $tool_version into build/docs/tool"
    cargo install --quiet --locked mdbook --version "$tool_version" --root build/docs/tool
fi
"$tool" build docs --dest-dir "$PWD/build/book"
RUSTDOCFLAGS="-D warnings -A rustdoc::private_intra_doc_links" cargo doc --quiet --workspace --no-deps --target-dir build/docs/rustdoc
rm -rf build/book/api
cp -r build/docs/rustdoc/doc build/book/api
echo "docs: build/book/index.html"
