#!/bin/bash
# SPDX-License-Identifier: Apache-2.0
# deny.sh: checks the dependencies by deny.toml: advisories, licences, versions, origins.
#
# cargo-deny is installed into build/tools. It fetches the RustSec advisories into build/advisories; where they cannot be fetched
# it takes the copy of the last time, and without one it checks the rest, says so, and ends with status 1.
set -euo pipefail
cd "$(dirname "$0")/.."

version=0.18.5
tool=build/tools/bin/cargo-deny
if [ "$("$tool" --version 2>/dev/null)" != "cargo-deny $version" ]; then
    echo "deny: installing cargo-deny $version into build/tools"
    cargo install --quiet --locked cargo-deny --version "$version" --root build/tools
fi

"$tool" --locked check bans licenses sources
if "$tool" --locked fetch db; then
    "$tool" --locked check advisories
elif [ -d build/advisories ]; then
    echo "deny: the advisories cannot be fetched; checking by the copy of the last time" >&2
    "$tool" --locked check --disable-fetch advisories
else
    echo "deny: the advisories cannot be fetched, and there is no copy: not checked" >&2
    exit 1
fi
