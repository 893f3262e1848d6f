#!/bin/bash
# SPDX-License-Identifier: Apache-2.0
# lab-image.sh: makes the lab's guest image under build/lab.
#
#   scripts/lab-image.sh             make what is missing; no network when the cache is good
#   scripts/lab-image.sh --update    look in the archive for newer packages
#   scripts/lab-image.sh --guest     only rebuild our own programs in it
#   scripts/lab-image.sh --bare      of our own programs only the guest's init: all that `make run` needs
#
# The guest kernel is Debian's user-mode-linux (sid); the root consists of packages of Debian
# trixie. apt fetches them into a private state below build/lab/apt and checks the archive's signed
# index. The script installs none of them on this host. Results:
#   build/lab/images/HASH/linux.uml  the kernel, tied to the loader and libc of its own root
#   build/lab/images/HASH/root       root file system, shared read-only by all guests
#   build/lab/images/HASH/MANIFEST   SHA-256 of every file; PACKAGES: versions and SHA-256
#   build/lab/current                symbolic link to the image in use
# An image is built in a temporary folder and renamed, so a killed run leaves no half image.
set -euo pipefail
umask 022

top=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
lab=${VIOLA_LAB_BUILD:-$top/build/lab}
state=$lab/apt
. "$top/scripts/private-apt.sh"
from_sid=(user-mode-linux)
from_trixie=(busybox-static libc6 libcrypt1 libgcc-s1 libpcre2-8-0 libssl3t64 libzstd1 zlib1g nginx
    lighttpd libnettle8t64 libxxhash0 apache2-bin libapr1t64 libaprutil1t64 libexpat1 libuuid1
    iproute2 libbpf1 libcap2 libelf1t64 libmnl0 libselinux1 libxtables12
    haproxy libjemalloc2 liblua5.4-0 libopentracing-c-wrapper0t64 libopentracing1 libstdc++6
    coreutils libacl1 libattr1
    openssh-server openssh-sftp-server libwrap0 libaudit1 libcap-ng0 libpam0g libgssapi-krb5-2 libkrb5-3
    libk5crypto3 libkrb5support0 libkeyutils1 libcom-err2 libwtmpdb0 libsqlite3-0
    libnfs-utils libnfs14
    mariadb-server-core libaio1t64 libnuma1 libsnappy1v5 liburing2 libsystemd0
    php8.4-fpm php8.4-common php8.4-mysql php8.4-opcache libapparmor1 libargon2-1 libsodium23 libxml2 liblzma5)
recipe=6 # raise when the steps of build_image change

say() { printf 'lab-image: %s\n' "$*"; }
die() { printf 'lab-image: %s\n' "$*" >&2; exit 1; }

update=no only_guest=no bare=no
for arg in "$@"; do
    case $arg in
        --update) update=yes ;;
        --guest) only_guest=yes ;;
        --bare) bare=yes ;;
        -h | --help) sed -n '3,8s/^# \{0,1\}//p' "$0"; exit 0 ;;
        *) die "unknown option $arg; see --help" ;;
    esac
done
[ "$(uname -m)" = x86_64 ] || die "the lab's guests need an x86_64 host"

mkdir -p "$lab"
exec 9>"$lab/.lock"
flock 9 # one build at a time; the second finds the first one's result

# Fetch the packages into $lab/debs and name them in $lab/debs/PACKAGES.
fetch() {
    local new=$lab/debs.new
    private_index sid trixie
    rm -rf "$new"
    mkdir -p "$new"
    # packages of the last run are not fetched again when their version still holds
    [ -d "$lab/debs" ] && cp -l "$lab"/debs/*.deb "$new/" 2>/dev/null || true
    say "fetching packages"
    local wanted=("${from_sid[@]/%//sid}" "${from_trixie[@]/%//trixie}") want pkg suite file version
    (cd "$new" && private_apt download "${wanted[@]}")
    # apt's own names of those files, in the order asked for (it prints them where they are not)
    (cd "$lab/apt" && private_apt download --print-uris "${wanted[@]}") | awk '{print $2}' >"$lab/apt/files"
    : >"$new/PACKAGES"
    for want in "${wanted[@]}"; do
        pkg=${want%/*} suite=${want#*/}
        file=$(grep "^${pkg}_" "$lab/apt/files") || die "the archive's $suite has no package $pkg"
        version=$(dpkg-deb -f "$new/$file" Version)
        printf '%s %s %s %s %s\n' "$(sha256sum "$new/$file" | cut -d' ' -f1)" "$file" "$pkg" "$version" "$suite" \
            >>"$new/PACKAGES"
    done
    local deb
    for deb in "$new"/*.deb; do
        grep -qF " ${deb##*/} " "$new/PACKAGES" || rm -f "$deb"
    done
    rm -rf "$lab/debs"
    mv -T "$new" "$lab/debs"
}

# Whether debs/ has exactly the wanted packages, each with the SHA-256 of its line in PACKAGES.
debs_good() {
    [ -s "$lab/debs/PACKAGES" ] &&
        [ "$(awk '{print $3}' "$lab/debs/PACKAGES" | sort)" = "$(printf '%s\n' "${from_sid[@]}" "${from_trixie[@]}" | sort)" ] &&
        (cd "$lab/debs" && awk '{print $1 "  " $2}' PACKAGES | sha256sum -c --quiet >/dev/null 2>&1)
}

image_hash() { { echo "recipe $recipe"; cat "$lab/debs/PACKAGES"; } | sha256sum | cut -c1-16; }

image_good() {
    [ -s "$1/MANIFEST" ] && (cd "$1" && sha256sum -c --quiet MANIFEST >/dev/null 2>&1)
}

build_image() {
    local image=$1 new=$lab/images/.new.$$ lib root deb
    mkdir -p "$lab/images"
    rm -rf "$lab"/images/.new.*
    root=$new/root
    mkdir -p "$root"/{dev,proc,sys,tmp,run,var,etc,root,mnt,usr/bin,usr/sbin,usr/lib,usr/lib64}
    ln -s usr/bin "$root/bin"
    ln -s usr/sbin "$root/sbin"
    ln -s usr/lib "$root/lib"
    ln -s usr/lib64 "$root/lib64"
    say "unpacking"
    local not_all
    for deb in $(awk '{print $2}' "$lab/debs/PACKAGES"); do
        # of coreutils only cp, because busybox's does not use copy_file_range
        not_all=()
        case $deb in coreutils_*) not_all=(./usr/bin/cp) ;; esac
        # without kernel modules and documents: guests do not need them, and they are most of the size
        dpkg-deb --fsys-tarfile "$lab/debs/$deb" |
            tar -x -C "$root" --keep-directory-symlink --no-same-owner \
                --exclude='./usr/lib/uml/modules' --exclude='./usr/share/doc' \
                --exclude='./usr/share/man' --exclude='./usr/share/lintian' \
                --exclude='./usr/lib/*/gconv' --exclude='./etc/init.d' --exclude='./usr/lib/systemd' \
                "${not_all[@]}"
    done
    # except the modules of virtio-fs, vsock and netem
    local uml=$root/usr/lib/uml/modules version
    dpkg-deb --fsys-tarfile "$lab/debs/$(awk '$3 == "user-mode-linux" {print $2}' "$lab/debs/PACKAGES")" |
        tar -x -C "$root" --no-same-owner --wildcards './usr/lib/uml/modules/*/kernel/fs/fuse/*' \
            './usr/lib/uml/modules/*/kernel/net/vmw_vsock/*' './usr/lib/uml/modules/*/kernel/net/sched/sch_netem.ko' \
            './usr/lib/uml/modules/*/modules.dep' './usr/lib/uml/modules/*/modules.alias'
    for version in "$uml"/*; do
        sed -i -nE '/^kernel\/(fs\/fuse\/|net\/vmw_vsock\/|net\/sched\/sch_netem)/p' "$version/modules.dep"
        sed -i -nE '/ (fuse|cuse|virtiofs|vsock|vmw_vsock[a-z_]*|sch_netem)$/p' "$version/modules.alias"
    done
    mv "$uml" "$root/usr/lib/modules"
    ln -s ../bin/busybox "$root/usr/sbin/modprobe"
    mv "$root/usr/bin/linux.uml" "$new/linux.uml"
    mkdir -p "$root/usr/share/viola"
    printf 'root:x:0:0:root:/root:/bin/sh\nnobody:x:65534:65534:nobody:/:/bin/false\nsshd:x:100:65534::/run/sshd:/bin/false\n' \
        >"$root/etc/passwd"
    printf 'root:x:0:\nnogroup:x:65534:\n' >"$root/etc/group"
    printf 'passwd: files\ngroup: files\nhosts: files\n' >"$root/etc/nsswitch.conf"
    printf '127.0.0.1 localhost\n' >"$root/etc/hosts"
    ln -sfn /proc/mounts "$root/etc/mtab"
    local applet
    for applet in $("$root/usr/bin/busybox" --list); do
        [ -e "$root/usr/bin/$applet" ] || [ -e "$root/usr/sbin/$applet" ] || ln -s busybox "$root/usr/bin/$applet"
    done
    # The kernel runs as an ordinary program of this host with the loader and libc of the image's
    # root, which may be newer than the host's. The path is fixed: $image, after the rename.
    lib=root/usr/lib/x86_64-linux-gnu
    patchelf --set-interpreter "$image/$lib/ld-linux-x86-64.so.2" --set-rpath "$image/$lib" "$new/linux.uml"
    cp "$lab/debs/PACKAGES" "$new/PACKAGES"
    (cd "$new" && find . -type f ! -name 'MANIFEST*' -print0 | sort -z | xargs -0 sha256sum >MANIFEST.part &&
        mv MANIFEST.part MANIFEST)
    sync -f "$new" 2>/dev/null || true
    [ -e "$image" ] && { rm -rf "$image.bad"; mv -T "$image" "$image.bad"; rm -rf "$image.bad"; }
    mv -T "$new" "$image"
}

# Puts a file into an image by rename, if it differs.
put() {
    cmp -s "$1" "$2" && return
    cp "$1" "$2.new"
    chmod 755 "$2.new"
    mv "$2.new" "$2"
}

# viola's own programs: the guest's init and the guest agent, both static, and the preload library.
build_guest() {
    local image=$1 target=x86_64-unknown-linux-musl out flags=(--config "profile.release.strip=true")
    if [ "$(rustc --print target-libdir --target $target 2>/dev/null | xargs -r ls 2>/dev/null | wc -l)" -eq 0 ] &&
        ! { command -v rustup >/dev/null && rustup target add $target >/dev/null 2>&1; }; then
        target=x86_64-unknown-linux-gnu
        flags+=(--config "target.$target.rustflags=['-C','target-feature=+crt-static','-C','relocation-model=static']")
    fi
    local dir=${VIOLA_GUEST_TARGET_DIR:-$lab/cargo} program
    say "building viola-guest ($target)"
    (cd "$top" && cargo build -q --locked --release -p viola-lab --bin viola-guest --target $target --target-dir "$dir" "${flags[@]}")
    put "$dir/$target/release/viola-guest" "$image/root/usr/bin/viola-guest"
    ln -sfn usr/bin/viola-guest "$image/root/init"
    [ $bare = no ] || return 0
    say "building viola-agent and the preload library"
    # in a build of its own: a common build would unite the features and enlarge the agent
    (cd "$top" && cargo build -q --locked --release -p viola-agent --bin viola-agent --target $target --target-dir "$dir" "${flags[@]}")
    put "$dir/$target/release/viola-agent" "$image/root/usr/bin/viola-agent"
    # not static: it is loaded into the guest's programs, whose C library is newer than this host's
    (cd "$top" && cargo build -q --locked --release -p viola-libvpipe-preload --target-dir "$dir" --config "profile.release.strip=true")
    put "$dir/release/libvpipe_preload.so" "$image/root/usr/lib/libvpipe_preload.so"
    # and programs that call libvpipe themselves
    (cd "$top" && cargo build -q --locked --release -p viola-libvpipe --target-dir "$dir" --config "profile.release.strip=true")
    for program in crates/libvpipe/examples/upload.c lab/vpipe-times.c; do
        out=vpipe-$(basename "${program#*vpipe-}" .c)
        cc -O2 -I"$top/crates/libvpipe/include" "$top/$program" "$dir/release/libvpipe.a" -lpthread -ldl -lm -o "$dir/$out"
        put "$dir/$out" "$image/root/usr/bin/$out"
    done
}

if [ $only_guest = yes ]; then
    [ -e "$lab/current/root" ] || die "there is no image yet; run scripts/lab-image.sh without --guest"
    build_guest "$(readlink -f "$lab/current")"
    exit 0
fi

need_tools patchelf
if [ $update = yes ] || ! debs_good; then fetch; fi
debs_good || die "the fetched packages do not match their checksums; remove $lab/debs and try again"
image=$(readlink -f "$lab")/images/$(image_hash)
image_good "$image" || build_image "$image"
build_guest "$image"
ln -sfn "images/${image##*/}" "$lab/.current.new"
mv -T "$lab/.current.new" "$lab/current"
say "ready: $(awk '$3 == "user-mode-linux" {print "user-mode-linux " $4}' "$image/PACKAGES"), $(du -sm --apparent-size "$image" | cut -f1) MB in ${image#"$top"/}"
