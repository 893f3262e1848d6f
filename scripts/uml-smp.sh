#!/bin/bash
# SPDX-License-Identifier: Apache-2.0
# uml-smp.sh [--update|--check]: the lab's kernel for guests with several vCPUs, build/uml-smp/linux.uml.
#
#   scripts/uml-smp.sh            make it unless it is there and good; 6 to 15 minutes on two cores
#   scripts/uml-smp.sh --update   look in the archive for a newer source
#   scripts/uml-smp.sh --check    only tell whether it is there and good (exit status)
#
# Debian's user-mode-linux is built for one vCPU, but its source can do more (User Mode Linux has SMP since 7.0).
# apt fetches Debian's linux-source into a private state below build/uml-smp/apt, checked against the archive's
# signed index. What is set on top of the defaults is in lab/uml-smp.config, the one change to the source in
# lab/uml-smp.patch. Built in a folder of its own that goes afterwards (2.5 GB), so a killed run leaves no half kernel.
set -euo pipefail
umask 022

top=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
here=${VIOLA_UML_SMP_BUILD:-$top/build/uml-smp}
state=$here/apt
. "$top/scripts/private-apt.sh"
package=linux-source-7.2

say() { printf 'uml-smp: %s\n' "$*"; }
die() { printf 'uml-smp: %s\n' "$*" >&2; exit 1; }

update=no check=no
for arg in "$@"; do
    case $arg in
        --update) update=yes ;;
        --check) check=yes ;;
        -h | --help) sed -n '3,7s/^# \{0,1\}//p' "$0"; exit 0 ;;
        *) die "unknown option $arg; see --help" ;;
    esac
done
[ "$(uname -m)" = x86_64 ] || die "the lab's guests need an x86_64 host"

# Whether the package is there with the SHA-256 of its line in PACKAGES.
deb_good() {
    [ -s "$here/debs/PACKAGES" ] &&
        (cd "$here/debs" && awk '{print $1 "  " $2}' PACKAGES | sha256sum -c --quiet >/dev/null 2>&1)
}

# What the kernel is made of.
stamp() {
    (cd "$top" && sha256sum scripts/uml-smp.sh lab/uml-smp.config lab/uml-smp.patch)
    cat "$here/debs/PACKAGES"
}

kernel_good() {
    [ -s "$here/MANIFEST" ] && [ "$(stamp 2>/dev/null)" = "$(cat "$here/STAMP")" ] &&
        (cd "$here" && sha256sum -c --quiet MANIFEST >/dev/null 2>&1)
}

if [ $check = yes ]; then kernel_good; exit; fi

mkdir -p "$here"
exec 9>"$here/.lock"
flock 9 # one build at a time; the second finds the first one's result

fetch() {
    local new=$here/debs.new deb
    say "reading the archive's index"
    private_index sid trixie-backports ||
        die "no index: this machine's apt sources have to name a Debian mirror that ends in /debian, and it has to answer"
    rm -rf "$new"
    mkdir -p "$new"
    say "fetching $package"
    (cd "$new" && private_apt download $package)
    deb=$(cd "$new" && echo ${package}_*.deb)
    printf '%s %s %s %s\n' "$(sha256sum "$new/$deb" | cut -d' ' -f1)" "$deb" $package \
        "$(dpkg-deb -f "$new/$deb" Version)" >"$new/PACKAGES"
    rm -rf "$here/debs"
    mv -T "$new" "$here/debs"
}

# Every line of the configuration has to hold: an option that the source has no more would be lost in silence.
config_holds() {
    local line name
    while read -r line; do
        case $line in
            CONFIG_*) grep -qxF "$line" "$1" || die "lab/uml-smp.config: the source does not take $line" ;;
            '# CONFIG_'*' is not set')
                name=${line#'# '}
                name=${name%' is not set'}
                ! grep -q "^$name=" "$1" || die "lab/uml-smp.config: the source insists on $name"
                ;;
        esac
    done <"$top/lab/uml-smp.config"
}

build() {
    local new=$here/.new source object
    rm -rf "$new"
    mkdir -p "$new/source" "$new/object"
    source=$new/source object=$new/object
    say "unpacking the source"
    dpkg-deb --fsys-tarfile "$here/debs/$(awk '{print $2}' "$here/debs/PACKAGES")" |
        tar -xO "./usr/src/$package.tar.xz" | xz -dc | tar -x -C "$source" --strip-components 1
    patch -s -p1 -d "$source" <"$top/lab/uml-smp.patch" || die "lab/uml-smp.patch does not fit this source"
    local make=(make -s -C "$source" ARCH=um "O=$object" KBUILD_BUILD_USER=viola KBUILD_BUILD_HOST=lab)
    "${make[@]}" x86_64_defconfig
    cat "$top/lab/uml-smp.config" >>"$object/.config"
    "${make[@]}" olddefconfig 2>/dev/null
    config_holds "$object/.config"
    say "compiling, 6 to 15 minutes"
    "${make[@]}" -j"$(nproc)" linux >"$here/build.log" 2>&1 || {
        tail -n 20 "$here/build.log" >&2
        die "the kernel does not compile; the whole text is in $here/build.log"
    }
    strip -o "$new/linux.uml" "$object/linux"
    "$new/linux.uml" --version >/dev/null || die "the kernel does not run"
    rm -f "$here/MANIFEST"
    mv "$new/linux.uml" "$here/linux.uml"
    stamp >"$here/STAMP"
    (cd "$here" && sha256sum linux.uml >MANIFEST.part && mv MANIFEST.part MANIFEST)
    rm -rf "$new"
}

need_tools gcc make flex bison bc patch
if [ $update = yes ] || ! deb_good; then fetch; fi
deb_good || die "the fetched package does not match its checksum; remove $here/debs and try again"
kernel_good || build
say "ready: $(awk '{print $3, $4}' "$here/debs/PACKAGES"), ${here#"$top"/}/linux.uml"
