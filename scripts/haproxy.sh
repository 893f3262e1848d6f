#!/bin/bash
# SPDX-License-Identifier: Apache-2.0
# haproxy.sh: put Debian's haproxy, and the libraries that it needs, below build/haproxy for the tests.
#
# Nothing is installed on this machine: apt fetches the packages into a private state, checked against the archive's
# signed index. Quick and quiet when all is there. The result is build/haproxy/root.
set -euo pipefail
umask 022

top=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
place=$top/build/haproxy
state=$place/apt
. "$top/scripts/private-apt.sh"
packages=(haproxy libc6 libcap2 libcrypt1 libgcc-s1 libjemalloc2 liblua5.4-0 libopentracing-c-wrapper0t64 libopentracing1
    libpcre2-8-0 libssl3t64 libstdc++6 libsystemd0 libzstd1 zlib1g)

die() {
    printf 'haproxy: %s\n' "$*" >&2
    exit 1
}

# whether it starts with the libraries beside it
runs() {
    local libraries=$1/usr/lib/x86_64-linux-gnu
    "$libraries/ld-linux-x86-64.so.2" --library-path "$libraries" "$1/usr/sbin/haproxy" -v >/dev/null 2>&1
}

[ "$(uname -m)" = x86_64 ] || die "this is for x86_64"
mkdir -p "$place"
exec 9>"$place/.lock"
flock 9
runs "$place/root" && exit 0
[ -e "$keyring" ] || die "there is no $keyring: run scripts/setup.sh first"
private_index trixie ||
    die "no index: this machine's apt sources have to name a Debian mirror that ends in /debian, and it has to answer"
rm -rf "$place/debs" "$place/new"
mkdir -p "$place/debs" "$place/new"
(cd "$place/debs" && private_apt download "${packages[@]/%//trixie}") || die "the packages cannot be fetched"
for link in bin sbin lib lib64; do
    mkdir -p "$place/new/usr/$link"
    ln -s "usr/$link" "$place/new/$link"
done
for deb in "$place"/debs/*.deb; do
    dpkg-deb --fsys-tarfile "$deb" | tar -x -C "$place/new" --keep-directory-symlink --no-same-owner \
        --exclude='./usr/share' --exclude='./etc' --exclude='./var' --exclude='./usr/lib/*/gconv'
done
runs "$place/new" || die "a library is missing: $("$place/new/usr/lib/x86_64-linux-gnu/ld-linux-x86-64.so.2" \
    --library-path "$place/new/usr/lib/x86_64-linux-gnu" "$place/new/usr/sbin/haproxy" -v 2>&1 | head -1)"
rm -rf "$place/root" "$place/debs"
mv -T "$place/new" "$place/root"
