#!/bin/bash
# SPDX-License-Identifier: Apache-2.0
# other-schedulers.sh [--check]: builds scx_lavd and scx_bpfland for `viola-lab bench scx`, in build/schedulers/bin.
#
#   scripts/other-schedulers.sh           make what is missing; 15 to 30 minutes on two cores
#   scripts/other-schedulers.sh --check   only tell whether both are there (exit status)
#
# They are crates, in the versions named below. Their BPF parts need clang 18 or newer. The script unpacks clang 19 of this
# host's Debian below build/schedulers, after checking the archive's signed index; it installs nothing on this host.
set -euo pipefail
umask 022

top=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
here=${VIOLA_SCHEDULERS_BUILD:-$top/build/schedulers}
state=$here/apt
. "$top/scripts/private-apt.sh"

schedulers=(scx_lavd@1.1.4 scx_bpfland@1.1.4)
release=bookworm
packages=(clang-19 libclang-cpp19 libclang1-19 libclang-common-19-dev libllvm19)

say() { printf 'other-schedulers: %s\n' "$*"; }
die() { printf 'other-schedulers: %s\n' "$*" >&2; exit 1; }

check=no
case ${1-} in
    '') ;;
    --check) check=yes ;;
    -h | --help) sed -n '3,6s/^# \{0,1\}//p' "$0"; exit 0 ;;
    *) die "unknown option $1; see --help" ;;
esac

good() {
    local one
    for one in "${schedulers[@]}"; do
        [ -x "$here/bin/${one%@*}" ] && [ "$(cat "$here/bin/${one%@*}.version" 2>/dev/null)" = "$one" ] || return 1
    done
}
if [ $check = yes ]; then good; exit; fi

mkdir -p "$here/bin"
exec 9>"$here/.lock"
flock 9
if good; then
    say "ready: ${schedulers[*]}, in ${here#"$top"/}/bin"
    exit
fi

clang_good() { "$here/clang/usr/lib/llvm-19/bin/clang" --version >/dev/null 2>&1; }

export LD_LIBRARY_PATH=$here/clang/usr/lib/x86_64-linux-gnu:$here/clang/usr/lib/llvm-19/lib
if ! clang_good; then
    new=$here/.new.clang
    private_index $release
    rm -rf "$here/.debs" "$new" "$here/clang"
    mkdir -p "$here/.debs" "$new"
    say "fetching clang 19"
    (cd "$here/.debs" && private_apt download "${packages[@]}")
    for deb in "$here"/.debs/*.deb; do dpkg-deb -x "$deb" "$new"; done
    mv -T "$new" "$here/clang"
    rm -rf "$here/.debs"
    clang_good || die "clang 19 does not run here: $("$here/clang/usr/lib/llvm-19/bin/clang" --version 2>&1 | tail -n 1)"
fi
export BPF_CLANG=$here/clang/usr/lib/llvm-19/bin/clang CLANG=$here/clang/usr/lib/llvm-19/bin/clang
export LIBCLANG_PATH=$here/clang/usr/lib/llvm-19/lib CARGO_TARGET_DIR=$here/target

for one in "${schedulers[@]}"; do
    name=${one%@*}
    [ "$(cat "$here/bin/$name.version" 2>/dev/null)" != "$one" ] || continue
    say "compiling $name, up to a quarter of an hour"
    cargo install --quiet --locked --root "$here" "$one" >"$here/$name.log" 2>&1 || {
        tail -n 20 "$here/$name.log" >&2
        die "$name does not compile; the whole text is in $here/$name.log"
    }
    "$here/bin/$name" --version >/dev/null || die "$name does not run"
    echo "$one" >"$here/bin/$name.version"
done
rm -rf "$here/target"
say "ready: ${schedulers[*]}, in ${here#"$top"/}/bin"
