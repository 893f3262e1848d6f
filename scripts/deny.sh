#!/bin/bash
# SPDX-License-Identifier: Apache-2.0
# deny.sh: checks the dependencies by deny.toml: advisories, licences, versions, origins.
#
# cargo-deny is installed into build/tools. It fetches the RustSec advisories into build/advisories; where they cannot be fetched
# it takes the copy of the last time. VIOLA_ADVISORIES names a git repository of them on this machine instead. Without any the
# script checks the rest, says so, and ends with status 1.
set -euo pipefail
cd "$(dirname "$0")/.."

version=0.18.5
tool=build/tools/bin/cargo-deny
if [ "$("$tool" --version 2>/dev/null)" != "cargo-deny $version" ]; then
    echo "deny: installing cargo-deny $version into build/tools"
    cargo install --quiet --locked cargo-deny --version "$version" --root build/tools
fi

"$tool" --locked check bans licenses sources
copy() { # git repository with the advisories
    # cargo-deny looks for them under this name, that of their address
    rm -rf build/advisories
    git clone --quiet "$1" build/advisories/advisory-db-3157b0e258782691
}
if [ -n "${VIOLA_ADVISORIES-}" ]; then
    copy "$VIOLA_ADVISORIES"
elif "$tool" --locked fetch db; then
    exec "$tool" --locked check advisories
elif compgen -G 'build/advisories/*/.git' >/dev/null; then
    echo "deny: the advisories cannot be fetched; checking by the copy of the last time" >&2
else
    echo "deny: the advisories cannot be fetched, and there is no copy: not checked; VIOLA_ADVISORIES names one" >&2
    exit 1
fi
"$tool" --locked check --disable-fetch advisories
