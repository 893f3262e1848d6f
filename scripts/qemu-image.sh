#!/bin/bash
# SPDX-License-Identifier: Apache-2.0
# qemu-image.sh [--rdma] [--update]: kernel and initramfs of the lab's QEMU guests, under build/qemu.
#
#   scripts/qemu-image.sh           make what is missing or older than viola-guest and viola-agent
#   scripts/qemu-image.sh --rdma    the same with Debian's ordinary kernel, which has RDMA, and its tools
#   scripts/qemu-image.sh --update  look in the archive for newer packages
#
# The kernel is that of Debian trixie, in the cloud's flavour; apt fetches it into a private state, checked against
# the archive's signed index, and nothing of it is installed on this machine. Programs come from the lab's image
# (lab-image.sh). Results, in build/qemu/cloud or build/qemu/rdma:
#   vmlinuz, initrd.img     what QEMU boots; MANIFEST has their SHA-256, PACKAGES where they are from
set -euo pipefail
umask 022

top=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
lab=${VIOLA_LAB_BUILD:-$top/build/lab}
qemu=${VIOLA_QEMU_BUILD:-$top/build/qemu}
state=$qemu/apt
. "$top/scripts/private-apt.sh"

say() { printf 'qemu-image: %s\n' "$*"; }
die() { printf 'qemu-image: %s\n' "$*" >&2; exit 1; }

kind=cloud meta=linux-image-cloud-amd64 update=no
modules=(virtio_pci virtio_blk virtio_console virtio_net virtio_rng virtiofs fuse ext4 xfs vmw_vsock_virtio_transport af_packet)
tools=()
for arg in "$@"; do
    case $arg in
        --rdma)
            kind=rdma meta=linux-image-amd64
            modules+=(rdma_rxe ib_uverbs rdma_ucm veth)
            # rxe's own tests, and what they and the loader need
            tools=(perftest ibverbs-utils ibverbs-providers libibverbs1 librdmacm1t64 libibumad3 libnl-3-200
                libnl-route-3-200 libpci3 libudev1 zlib1g libc6 iproute2 libelf1t64 libbpf1 libzstd1 libmnl0 libcap2
                libselinux1 libpcre2-8-0 libtirpc3t64 libdb5.3t64 libxtables12 libgssapi-krb5-2 libkrb5-3
                libk5crypto3 libcom-err2 libkrb5support0 libssl3t64 libkeyutils1 iperf3 libiperf0 libsctp1)
            ;;
        --update) update=yes ;;
        -h | --help) sed -n '3,7s/^# \{0,1\}//p' "$0"; exit 0 ;;
        *) die "unknown option $arg; see --help" ;;
    esac
done
[ "$(uname -m)" = x86_64 ] || die "this makes guests for x86_64 only"
[ -e "$lab/current/root/usr/bin/viola-guest" ] || die "there is no image of the lab yet; run scripts/lab-image.sh first"
root=$(readlink -f "$lab/current/root")
busybox=$root/usr/bin/busybox
command -v xz >/dev/null || die "xz is missing; install xz-utils"

mkdir -p "$qemu"
exec 9>"$qemu/.lock"
flock 9

debs=$qemu/debs-$kind
debs_good() {
    [ -s "$debs/PACKAGES" ] &&
        (cd "$debs" && awk '{print $1 "  " $2}' PACKAGES | sha256sum -c --quiet >/dev/null 2>&1)
}

fetch() {
    local new=$debs.new kernel deb
    say "reading the archive's index"
    private_index trixie ||
        die "no index: this machine's apt sources have to name a Debian mirror that ends in /debian, and it has to answer"
    rm -rf "$new"
    mkdir -p "$new/meta"
    say "fetching packages"
    (cd "$new/meta" && private_apt download "$meta")
    kernel=$(dpkg-deb -f "$new/meta/$meta"_*.deb Depends | grep -oE 'linux-image-[0-9][^ ,]*' | sed -n 1p)
    [ -n "$kernel" ] || die "the archive's $meta names no kernel"
    rm -r "$new/meta"
    (cd "$new" && private_apt download "$kernel" "${tools[@]}")
    for deb in "$new"/*.deb; do
        printf '%s %s %s %s\n' "$(sha256sum "$deb" | cut -d' ' -f1)" "${deb##*/}" \
            "$(dpkg-deb -f "$deb" Package)" "$(dpkg-deb -f "$deb" Version)"
    done >"$new/PACKAGES"
    rm -rf "$debs"
    mv -T "$new" "$debs"
}

# Modules of the list and all that they need, in $1/modules.dep's own order and words.
needed() {
    awk -v wanted="${modules[*]}" '
        { name = $1; sub(/:$/, "", name); path[NR] = name; key = name; sub(/.*\//, "", key); sub(/\.ko.*/, "", key)
          gsub(/-/, "_", key); of[key] = name; deps[name] = $0; sub(/^[^ ]*: ?/, "", deps[name]) }
        END { n = split(wanted, w, " ")
              for (i = 1; i <= n; i++) if (w[i] in of) { take[of[w[i]]] = 1
                  m = split(deps[of[w[i]]], d, " "); for (j = 1; j <= m; j++) take[d[j]] = 1 }
              for (i = 1; i <= NR; i++) if (path[i] in take) print path[i] }' "$1/modules.dep"
}

build() {
    local new=$qemu/.new.$kind tree deb version module from
    rm -rf "$new"
    mkdir -p "$new/kernel" "$new/root"
    tree=$new/root
    say "making the initramfs"
    for deb in $(awk '{print $2}' "$debs/PACKAGES"); do
        case $deb in
            linux-image-*) dpkg-deb -x "$debs/$deb" "$new/kernel" ;;
            *)
                dpkg-deb --fsys-tarfile "$debs/$deb" | tar -x -C "$tree" --keep-directory-symlink --no-same-owner \
                    --exclude='./usr/share/doc' --exclude='./usr/share/man' --exclude='./usr/share/lintian' \
                    --exclude='./usr/lib/*/gconv' --exclude='./etc/init.d' --exclude='./usr/lib/systemd'
                ;;
        esac
    done
    from=$(echo "$new"/kernel/lib/modules/* "$new"/kernel/usr/lib/modules/*)
    for version in $from; do [ -d "$version" ] && from=$version; done
    version=${from##*/}
    mv "$new"/kernel/boot/vmlinuz-* "$new/vmlinuz"
    # the same program of the guests that makes the archive below
    "$busybox" depmod -b "${from%/lib/modules/*}" "$version" 2>/dev/null
    mkdir -p "$tree"/{dev,proc,sys,tmp,run,var,etc,root,mnt,usr/bin,usr/sbin,usr/lib,usr/lib64}
    for module in bin sbin lib lib64; do [ -e "$tree/$module" ] || ln -s "usr/$module" "$tree/$module"; done
    for module in $(needed "$from"); do
        mkdir -p "$tree/usr/lib/modules/$version/$(dirname "$module")"
        case $module in
            *.xz) xz -dc "$from/$module" >"$tree/usr/lib/modules/$version/${module%.xz}" ;;
            *) cp "$from/$module" "$tree/usr/lib/modules/$version/$module" ;;
        esac
    done
    "$busybox" depmod -b "$tree/usr" "$version"
    cp "$busybox" "$root"/usr/bin/viola-{guest,agent} "$tree/usr/bin/"
    for module in $("$busybox" --list); do
        [ -e "$tree/usr/bin/$module" ] || [ -e "$tree/usr/sbin/$module" ] || ln -s busybox "$tree/usr/bin/$module"
    done
    cp "$root"/etc/{passwd,group,nsswitch.conf,hosts} "$tree/etc/"
    ln -sfn /proc/mounts "$tree/etc/mtab"
    ln -sfn usr/bin/viola-guest "$tree/init"
    cat >"$tree/boot" <<'BOOT'
#!/bin/busybox sh
# What an init of a real VM and its udev do before: drivers, and names of the ports.
export PATH=/usr/sbin:/usr/bin
mount -t devtmpfs devtmpfs /dev
mount -t proc proc /proc
mount -t sysfs sysfs /sys
for module in virtio_pci virtio_console virtio_blk virtiofs; do modprobe $module 2>/dev/null; done
mkdir -p /dev/virtio-ports
for try in 1 2 3 4 5 6 7 8 9 10; do
    for port in /sys/class/virtio-ports/*; do
        read -r name <$port/name && ln -sfn ../${port##*/} /dev/virtio-ports/$name
    done 2>/dev/null
    [ -e /dev/virtio-ports/org.viola.lab.0 ] && break
    usleep 100000
done
umount /proc /sys
exec /init
BOOT
    chmod 755 "$tree/boot"
    (cd "$tree" && find . -print | "$busybox" cpio -o -H newc 2>/dev/null) | gzip -1 >"$new/initrd.img"
    rm -rf "$new/kernel" "$new/root"
    cp "$debs/PACKAGES" "$new/PACKAGES"
    stamp >"$new/STAMP"
    (cd "$new" && sha256sum vmlinuz initrd.img >MANIFEST)
    rm -rf "$qemu/$kind.old"
    [ ! -e "$qemu/$kind" ] || mv -T "$qemu/$kind" "$qemu/$kind.old"
    mv -T "$new" "$qemu/$kind"
    rm -rf "$qemu/$kind.old"
}

# What an image is made of: this script, the packages, our programs.
stamp() {
    sha256sum "$top/scripts/qemu-image.sh" "$debs/PACKAGES" "$busybox" "$root"/usr/bin/viola-{guest,agent} | cut -d' ' -f1
}

image_good() {
    [ -s "$qemu/$kind/MANIFEST" ] && (cd "$qemu/$kind" && sha256sum -c --quiet MANIFEST >/dev/null 2>&1) &&
        [ "$(stamp)" = "$(cat "$qemu/$kind/STAMP")" ]
}

if [ $update = yes ] || ! debs_good; then fetch; fi
debs_good || die "the fetched packages do not match their checksums; remove $debs and try again"
image_good || build
say "ready: $(awk '$3 ~ /^linux-image/ {print $3}' "$qemu/$kind/PACKAGES"), $(du -sm --apparent-size "$qemu/$kind" | cut -f1) MB in ${qemu#"$top"/}/$kind"
