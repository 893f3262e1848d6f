#!/bin/bash
# SPDX-License-Identifier: Apache-2.0
# deb.sh [--debug]: the packages viola (hosts) and viola-agent (guests) in build/deb, and a look at what is in them (check-deb.sh).
#
# With --debug they have the program as the tests have built it, which saves a quarter of an hour, and are in build/deb/debug.
#
# cargo-deb is installed into build/deb/tool; the guests' programs are static, so the package suits older guests as well. The plug-in
# for HDFS clients is built by Maven (scripts/hadoop.sh).
set -euo pipefail
cd "$(dirname "$0")/.."

tool_version=3.8.0
tool=build/deb/tool/bin/cargo-deb
musl=x86_64-unknown-linux-musl

case ${1-} in
'') profile=release packages=build/deb ;;
--debug) profile=dev packages=build/deb/debug ;;
*) echo "deb: unknown option $1; there is only --debug" >&2; exit 2 ;;
esac

mkdir -p "$packages"
if [ "$("$tool" --version 2>/dev/null)" != "cargo-deb $tool_version" ]; then
    echo "deb: installing cargo-deb $tool_version into build/deb/tool"
    # a debug build: it takes a third of the time, and packs two small packages
    cargo install --quiet --debug --locked cargo-deb --version "$tool_version" --root build/deb/tool
fi

if [ $profile = dev ]; then
    # with all tests, so that nothing is built again with other features
    cargo test --quiet --locked --workspace --no-run
    program=${CARGO_TARGET_DIR:-target}/debug/viola
else
    cargo build --quiet --locked --release -p viola
    program=${CARGO_TARGET_DIR:-target}/release/viola
fi
rm -rf build/deb/man build/deb/agent
"$program" man build/deb/man
scripts/sbom.py viola build/deb/viola.cdx.json
scripts/sbom.py viola-agent build/deb/viola-agent.cdx.json
scripts/sbom.py viola-libvpipe-preload build/deb/libvpipe-preload.cdx.json

scripts/hadoop.sh --jar

# the lab's image has built both for its guests
scripts/lab-image.sh
mkdir build/deb/agent
cargo=build/lab/cargo
install -m 755 "$cargo/$musl/release/viola-agent" build/deb/agent/viola-agent
install -m 644 "$cargo/release/libvpipe_preload.so" build/deb/agent/libvpipe_preload.so

version=$(sed -n 's/^version = "\(.*\)"/\1/p' Cargo.toml | head -1)
date=$(git log -1 --format=%cD 2>/dev/null || date -R)
cat >build/deb/changelog <<END
viola ($version-1) unstable; urgency=medium

  * The last changes are those of the repository.

 -- The viola authors <viola@localhost>  $date
END
for package in viola viola-agent; do
    "$tool" --quiet --no-build --strip --profile "$profile" --package "$package" --output "$packages/"
done
scripts/check-deb.sh "$packages/viola_$version-1_amd64.deb" "$packages/viola-agent_$version-1_amd64.deb"
