#!/bin/bash
# SPDX-License-Identifier: Apache-2.0
# guest-kmod.sh [--headers]: builds guest-kmod/ for the kernel of `qemu-image.sh --new`: build/qemu/kmod/viola_ack.ko.
# With --headers it also builds it, as a trial, with the newest headers of each series of kernels that the archive has.
#
# Headers and compiler come from the archive of the kernel, checked against its signed index. The script unpacks them
# into a folder and uses them there by chroot; it installs nothing on this host.
# In a VM of your own, use guest-kmod/Makefile with the headers of its kernel, or dkms.
set -euo pipefail
umask 022

top=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
qemu=${VIOLA_QEMU_BUILD:-$top/build/qemu}
here=$qemu/kmod
state=$here/apt
. "$top/scripts/private-apt.sh"

say() { printf 'guest-kmod: %s\n' "$*"; }
die() { printf 'guest-kmod: %s\n' "$*" >&2; exit 1; }

headers=no
case ${1-} in
    '') ;;
    --headers) headers=yes ;;
    -h | --help) sed -n '3,8s/^# \{0,1\}//p' "$0"; exit 0 ;;
    *) die "unknown option $1; see --help" ;;
esac
[ "$(id -u)" = 0 ] || die "chroot needs root; use sudo"
[ -s "$qemu/new/PACKAGES" ] || die "there is no kernel to build for; run scripts/qemu-image.sh --new first"
kernel=$(sed -nE 's/.* linux-image-([^ ]+) .*/\1/p' "$qemu/new/PACKAGES" | sed -n 1p)
[ -n "$kernel" ] || die "$qemu/new/PACKAGES names no kernel"

mkdir -p "$here"
exec 9>"$here/.lock"
flock 9

stamp() {
    (cd "$top" && sha256sum scripts/guest-kmod.sh guest-kmod/*.[ch] guest-kmod/Makefile)
    echo "$kernel"
}
if [ $headers = no ] && [ -s "$here/viola_ack.ko" ] && [ "$(stamp)" = "$(cat "$here/STAMP" 2>/dev/null)" ]; then
    say "ready: for $kernel, in ${here#"$top"/}"
    exit
fi

build_root() {
    local new=$here/.new.root names name deb
    private_index trixie trixie-backports
    mapfile -t names < <(private_apt install --print-uris --no-install-recommends "linux-headers-$kernel" gcc-14 make bash \
        dash coreutils sed gawk grep findutils binutils diffutils | sed -nE "s/^'[^']*' ([^_ ]+)_.*/\1/p" |
        grep -vE '^(adduser|base-passwd|debconf|login\.defs|passwd|libpam.*|libsemanage.*)$')
    [ ${#names[@]} -gt 10 ] || die "the archive has no headers of $kernel any more; run scripts/qemu-image.sh --new --update"
    rm -rf "$here/.debs" "$new"
    mkdir -p "$here/.debs" "$new"/usr/{bin,sbin,lib,lib64} "$new"/{tmp/m,dev,proc}
    say "fetching headers and compiler"
    (cd "$here/.debs" && private_apt download "${names[@]}")
    for name in bin sbin lib lib64; do ln -s "usr/$name" "$new/$name"; done
    for deb in "$here"/.debs/*.deb; do
        dpkg-deb --fsys-tarfile "$deb" | tar -x -C "$new" --keep-directory-symlink --no-same-owner \
            --exclude='./usr/share/doc' --exclude='./usr/share/man' --exclude='./usr/share/locale' --exclude='./usr/lib/*/gconv'
    done
    ln -sfn dash "$new/usr/bin/sh"
    ln -sfn gawk "$new/usr/bin/awk"
    mknod -m 666 "$new/dev/null" c 1 3
    echo "$kernel" >"$new/KERNEL"
    rm -rf "$here/.debs" "$here/root"
    mv -T "$new" "$here/root"
}

[ "$(cat "$here/root/KERNEL" 2>/dev/null)" = "$kernel" ] || build_root
# Builds the module in the root with the headers of a kernel: build KERNEL.
build() {
    rm -rf "$here/root/tmp/m"
    mkdir -p "$here/root/tmp/m"
    cp "$top"/guest-kmod/{*.[ch],Makefile} "$here/root/tmp/m/"
    # objtool needs /proc; the mount namespace removes the mount again
    unshare -m sh -c 'mount -t proc proc "$1/proc" && exec chroot "$1" /usr/bin/make -s -C /tmp/m "KDIR=/usr/src/linux-headers-$2"' \
        sh "$here/root" "$1" >"$here/build.log" 2>&1 || { cat "$here/build.log" >&2; die "the module cannot be built for $1"; }
}

# The newest kernel for cloud VMs of each series in the archive's index.
newest() {
    sed -nE 's/^Package: linux-headers-([0-9]+\.[0-9]+)(\.[^ ]*-cloud-amd64)$/\1 \1\2/p' "$state"/state/lists/*_Packages |
        sort -u -k 1,1V -k 2,2V | awk '{ last[$1] = $2 } END { for (series in last) print last[series] }' | sort -V
}

if [ $headers = yes ]; then
    private_index trixie trixie-backports
    for other in $(newest); do
        [ "$other" != "$kernel" ] || continue
        rm -rf "$here/.debs"
        mkdir -p "$here/.debs"
        mapfile -t names < <(private_apt install --print-uris --no-install-recommends "linux-headers-$other" |
            sed -nE "s/^'[^']*' (linux-[^_ ]+)_.*/\1/p")
        (cd "$here/.debs" && private_apt download "${names[@]}")
        for deb in "$here"/.debs/*.deb; do
            dpkg-deb --fsys-tarfile "$deb" | tar -x -C "$here/root" --keep-directory-symlink --no-same-owner --exclude='./usr/share/doc'
        done
        rm -rf "$here/.debs"
        build "$other"
        say "builds for $other"
    done
fi
build "$kernel"
cp "$here/root/tmp/m/viola_ack.ko" "$here/viola_ack.ko.new"
mv -T "$here/viola_ack.ko.new" "$here/viola_ack.ko"
stamp >"$here/STAMP"
say "ready: for $kernel, in ${here#"$top"/}"
