#!/bin/bash
# SPDX-License-Identifier: Apache-2.0
# mpi.sh [--update|--check]: MPICH and the Intel MPI Benchmarks for the lab's guests, in build/mpi.
#
#   scripts/mpi.sh            make it unless it is there and good; no network when the cache is good
#   scripts/mpi.sh --update   look in the archive for newer packages
#   scripts/mpi.sh --check    only tell whether it is there and good (exit status)
#
# MPICH is Debian trixie's, as the guests are: apt fetches it into a private state below build/mpi/apt, checked against the
# archive's signed index; nothing is installed on this machine. The benchmarks are Intel's source, by git from the project's
# own repository (or the one that VIOLA_IMB_REPO names) in the commit named below, compiled against trixie's C library.
# Results:
#   build/mpi/root       what guests mount at /run/mpi: MPICH, its libraries, usr/bin/IMB-MPI1
#   build/mpi/MANIFEST   SHA-256 of every file; debs/PACKAGES: versions and SHA-256
set -euo pipefail
umask 022

top=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
here=${VIOLA_MPI:-$top/build/mpi}
state=$here/apt
. "$top/scripts/private-apt.sh"
# what runs; the guests' image has libc6 and libcap2
runs=(mpich libmpich12 libucx0 libhwloc15 libslurm42t64 libudev1)
# what only the compiler reads
compiles=(libmpich-dev libc6 libc6-dev linux-libc-dev)
repository=${VIOLA_IMB_REPO:-https://github.com/intel/mpi-benchmarks.git}
release=IMB-v2021.11
commit=1a7cada09754be3ccf60c2698305a4c020b52e28
libraries=usr/lib/x86_64-linux-gnu

say() { printf 'mpi: %s\n' "$*"; }
die() { printf 'mpi: %s\n' "$*" >&2; exit 1; }

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

# Whether the packages are those that are wanted, each with the SHA-256 of its line in PACKAGES.
debs_good() {
    [ -s "$here/debs/PACKAGES" ] &&
        [ "$(awk '{print $3}' "$here/debs/PACKAGES" | sort)" = "$(printf '%s\n' "${runs[@]}" "${compiles[@]}" | sort)" ] &&
        (cd "$here/debs" && awk '{print $1 "  " $2}' PACKAGES | sha256sum -c --quiet >/dev/null 2>&1)
}

# What it is made of.
stamp() {
    (cd "$top" && sha256sum scripts/mpi.sh)
    cat "$here/debs/PACKAGES"
}

good() {
    debs_good && [ -s "$here/MANIFEST" ] && [ "$(stamp)" = "$(cat "$here/STAMP" 2>/dev/null)" ] &&
        (cd "$here" && sha256sum -c --quiet MANIFEST >/dev/null 2>&1)
}

if [ $check = yes ]; then good; exit; fi

mkdir -p "$here"
exec 9>"$here/.lock"
flock 9 # one build at a time; the second finds the first one's result

fetch() {
    local new=$here/debs.new package file
    say "reading the archive's index"
    private_index trixie ||
        die "no index: this machine's apt sources have to name a Debian mirror that ends in /debian, and it has to answer"
    rm -rf "$new"
    mkdir -p "$new"
    say "fetching MPICH"
    (cd "$new" && private_apt download "${runs[@]}" "${compiles[@]}")
    for package in "${runs[@]}" "${compiles[@]}"; do
        file=$(cd "$new" && echo "${package}"_*.deb)
        printf '%s %s %s %s\n' "$(sha256sum "$new/$file" | cut -d' ' -f1)" "$file" "$package" \
            "$(dpkg-deb -f "$new/$file" Version)" >>"$new/PACKAGES"
    done
    rm -rf "$here/debs"
    mv -T "$new" "$here/debs"
}

# The benchmarks' source: git itself checks that a commit is what its name says.
source_there() { git -C "$here/imb.git" cat-file -e "$commit^{tree}" 2>/dev/null; }
fetch_source() {
    say "fetching the Intel MPI Benchmarks, $release"
    rm -rf "$here/imb.git"
    git init -q --bare "$here/imb.git"
    git -C "$here/imb.git" fetch -q --depth 1 "$repository" "refs/tags/$release" ||
        die "the benchmarks' source cannot be fetched from $repository; VIOLA_IMB_REPO names another copy of it"
    source_there || die "$repository has another commit at $release than $commit"
}

# unpack FOLDER PACKAGE...
unpack() {
    local folder=$1 package
    shift
    mkdir -p "$folder"/usr/{bin,lib,lib64,sbin}
    ln -s usr/lib "$folder/lib"
    ln -s usr/lib64 "$folder/lib64"
    for package in "$@"; do
        dpkg-deb --fsys-tarfile "$here/debs/$(awk -v p="$package" '$3 == p {print $2}' "$here/debs/PACKAGES")" |
            tar -x -C "$folder" --keep-directory-symlink --no-same-owner --exclude='./usr/share' --exclude='./etc' \
                --exclude='./usr/lib/*/mpich/lib' --exclude='./usr/lib/*/fortran' --exclude='./usr/lib/*/gconv'
    done
}

build() {
    local new=$here/.new root=$here/.new/root sysroot=$here/.new/sysroot
    rm -rf "$new"
    unpack "$root" "${runs[@]}"
    unpack "$sysroot" "${runs[@]}" "${compiles[@]}"
    # what `mpicc` adds; Debian chooses between MPI libraries by links that its packages' scripts make
    local include=$sysroot/$libraries/mpich/include library=$sysroot/$libraries/libmpich.so.12
    [ -e "$include/mpi.h" ] && [ -e "$library" ] || die "this version of MPICH has its files in other places"
    mkdir "$new/source"
    git -C "$here/imb.git" archive "$commit" src_c license | tar -x -C "$new/source"
    say "compiling the benchmarks"
    # the C library of this machine may be older or newer than the guests'
    make -s -C "$new/source/src_c" TARGET=MPI1 CC=gcc CFLAGS="--sysroot=$sysroot -O2 -w -I$include" \
        LDFLAGS="--sysroot=$sysroot -Wl,--allow-shlib-undefined -Wl,--no-as-needed $library -lm" >"$here/build.log" 2>&1 || {
        tail -n 20 "$here/build.log" >&2
        die "the benchmarks do not compile; the whole text is in $here/build.log"
    }
    strip -o "$root/usr/bin/IMB-MPI1" "$new/source/src_c/IMB-MPI1"
    cp "$new/source/license/license.txt" "$root/LICENSE.IMB"
    rm -f "$here/MANIFEST"
    rm -rf "$here/root"
    mv -T "$root" "$here/root"
    stamp >"$here/STAMP"
    (cd "$here" && find root -type f -print0 | sort -z | xargs -0 sha256sum >MANIFEST.part && mv MANIFEST.part MANIFEST)
    rm -rf "$new"
}

if ! good || [ $update = yes ]; then
    need_tools gcc make git
    if [ $update = yes ] || ! debs_good; then fetch; fi
    debs_good || die "the fetched packages do not match their checksums; remove $here/debs and try again"
    source_there || fetch_source
    good || build
fi
say "ready: MPICH $(awk '$3 == "libmpich12" {print $4}' "$here/debs/PACKAGES"), $release, in ${here#"$top"/}"
