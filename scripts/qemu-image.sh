#!/bin/bash
# SPDX-License-Identifier: Apache-2.0
# qemu-image.sh [--rdma|--new|--lanes] [--update]: makes QEMU, and kernel and initramfs of its guests, under build/qemu.
#
#   scripts/qemu-image.sh           make what is missing or older than viola-guest and viola-agent
#   scripts/qemu-image.sh --rdma    the same with Debian's ordinary kernel, which has RDMA, and its tools
#   scripts/qemu-image.sh --new     the same with the kernel of Debian's backports
#   scripts/qemu-image.sh --lanes   the backports' ordinary kernel, with drivers of an SR-IOV NIC, bonds and KVM
#   scripts/qemu-image.sh --update  look in the archive for newer packages
#
# The kernel is Debian trixie's cloud kernel. apt fetches it and QEMU into a private state and checks the archive's signed
# index; the script installs neither on this host. Programs in the guest come from the lab's image (lab-image.sh).
# Results:
#   build/qemu/cloud, rdma, new or lanes: vmlinuz, initrd.img   MANIFEST has their SHA-256, PACKAGES where they are from
#   build/qemu/cloud/root.img: the root file system of the lab's image, for guests of a lab
#   build/qemu/program/root/usr/bin/qemu-system-x86_64
set -euo pipefail
umask 022

top=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
lab=${VIOLA_LAB_BUILD:-$top/build/lab}
qemu=${VIOLA_QEMU_BUILD:-$top/build/qemu}
state=$qemu/apt
mend=$top/scripts/qemu-mend.pl
. "$top/scripts/private-apt.sh"

say() { printf 'qemu-image: %s\n' "$*"; }
die() { printf 'qemu-image: %s\n' "$*" >&2; exit 1; }

kind=cloud meta=linux-image-cloud-amd64 suite=trixie update=no
modules=(virtio_pci virtio_blk nvme virtio_console virtio_net virtio_rng virtiofs fuse ext4 xfs
    vmw_vsock_virtio_transport af_packet)
tools=()
for arg in "$@"; do
    case $arg in
        --rdma)
            kind=rdma meta=linux-image-amd64
            modules+=(rdma_rxe ib_uverbs rdma_ucm veth crc32_generic crc32_pclmul)
            tools=(perftest ibverbs-utils ibverbs-providers iproute2 iperf3)
            ;;
        --new)
            kind=new suite=trixie-backports
            modules+=(veth bridge 8021q sch_netem sch_ingress cls_u32 act_police)
            tools=(iproute2 irqbalance)
            ;;
        --lanes)
            kind=lanes meta=linux-image-amd64 suite=trixie-backports
            modules+=(igb igbvf bonding net_failover veth bridge tun vhost_net vfio_pci vfio_iommu_type1 kvm_amd sch_netem)
            tools=(iproute2)
            ;;
        --update) update=yes ;;
        -h | --help) sed -n '3,9s/^# \{0,1\}//p' "$0"; exit 0 ;;
        *) die "unknown option $arg; see --help" ;;
    esac
done
[ $kind != cloud ] || modules+=(nfsd)
[ "$(uname -m)" = x86_64 ] || die "this makes guests for x86_64 only"
[ -e "$lab/current/root/usr/bin/viola-guest" ] || die "there is no image of the lab yet; run scripts/lab-image.sh first"
root=$(readlink -f "$lab/current/root")
busybox=$root/usr/bin/busybox
own=("$root"/usr/bin/viola-guest)
# An image that was made for `make run` has no agent.
[ ! -e "$root/usr/bin/viola-agent" ] || own+=("$root/usr/bin/viola-agent")
command -v xz >/dev/null || die "xz is missing; install xz-utils"

mkdir -p "$qemu"
exec 9>"$qemu/.lock"
flock 9

# Whether every package in folder $1 is there with the SHA-256 of its line in PACKAGES.
debs_good() {
    [ -s "$1/PACKAGES" ] && (cd "$1" && awk '{print $1 "  " $2}' PACKAGES | sha256sum -c --quiet >/dev/null 2>&1)
}

# Names of packages and their dependencies, without those that only an installed system needs.
closure() {
    private_apt install --print-uris --no-install-recommends "$@" |
        sed -nE "s/^'[^']*' ([^_ ]+)_.*/\1/p" | grep -vE '^(adduser|base-passwd|debconf|login\.defs|passwd|libpam.*|libsemanage.*)$'
}

# fetch FOLDER PACKAGES...: fetches packages into a folder and names them in its PACKAGES.
fetch() {
    local to=$1 new=$1.new deb
    shift
    rm -rf "$new"
    mkdir -p "$new"
    say "fetching packages"
    (cd "$new" && private_apt download "$@")
    for deb in "$new"/*.deb; do
        printf '%s %s %s %s\n' "$(sha256sum "$deb" | cut -d' ' -f1)" "${deb##*/}" \
            "$(dpkg-deb -f "$deb" Package)" "$(dpkg-deb -f "$deb" Version)"
    done >"$new/PACKAGES"
    rm -rf "$to"
    mv -T "$new" "$to"
}

index() {
    [ -z "${indexed-}" ] || return 0
    private_index trixie trixie-backports
    indexed=yes
}

# The packages behind the name of the newest kernel: one, or since 7.0 four.
kernel() {
    local folder name
    folder=$(mktemp -d "$qemu/.meta.XXXXXX")
    (cd "$folder" && private_apt download "$meta/$suite")
    name=$(dpkg-deb -f "$folder/$meta"_*.deb Depends | grep -oE 'linux-image-[0-9][^ ,]*' | sed -n 1p)
    [ -n "$name" ] || die "the archive's $meta names no kernel"
    echo "$name"
    (cd "$folder" && private_apt download "$name")
    dpkg-deb -f "$folder/$name"_*.deb Depends | grep -oE 'linux-(base|binary|modules)-[0-9][^ ,]*' || true
    rm -r "$folder"
}

# Unpacks package $1 into folder $2, without documents.
unpack() {
    dpkg-deb --fsys-tarfile "$1" | tar -x -C "$2" --keep-directory-symlink --no-same-owner \
        --exclude='./usr/share/doc' --exclude='./usr/share/man' --exclude='./usr/share/lintian' \
        --exclude='./usr/share/locale' --exclude='./usr/lib/*/gconv' --exclude='./etc/init.d' \
        --exclude='./usr/lib/systemd'
}

# QEMU. The host's own may be too old: 7.2 of Debian 12 fails on code that modifies itself, as kernels do at boot. This
# one uses the loader and libraries of its own root, as the lab's kernel does, and is patched for a fault of emulated AMD
# hosts that stops their guests at boot under -icount.
build_program() {
    local new=$qemu/.new.program root=$qemu/program/root deb name
    command -v patchelf >/dev/null || die "patchelf is missing; run scripts/setup.sh"
    rm -rf "$new"
    mkdir -p "$new"/root/usr/{bin,sbin,lib,lib64}
    for name in bin sbin lib lib64; do ln -s "usr/$name" "$new/root/$name"; done
    for deb in "$qemu"/debs-program/*.deb; do unpack "$deb" "$new/root"; done
    patchelf --set-interpreter "$root/usr/lib64/ld-linux-x86-64.so.2" --force-rpath \
        --set-rpath "$root/usr/lib/x86_64-linux-gnu" "$new/root/usr/bin/qemu-system-x86_64"
    "$mend" "$new/root/usr/bin/qemu-system-x86_64"
    sha256sum "$qemu/debs-program/PACKAGES" "$mend" >"$new/STAMP"
    rm -rf "$qemu/program"
    mv -T "$new" "$qemu/program"
    "$root/usr/bin/qemu-system-x86_64" --version >/dev/null || die "QEMU does not run; remove $qemu/program and try again"
}

# Modules of the list and their dependencies, in the order and by the names of $1/modules.dep.
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
    mkdir -p "$tree"/{dev,proc,sys,tmp,run,var,etc,root,mnt,usr/bin,usr/sbin,usr/lib,usr/lib64}
    for module in bin sbin lib lib64; do ln -s "usr/$module" "$tree/$module"; done
    for deb in $(awk '{print $2}' "$debs/PACKAGES"); do
        case $deb in
            linux-image-* | linux-base-* | linux-binary-* | linux-modules-*) dpkg-deb -x "$debs/$deb" "$new/kernel" ;;
            *) unpack "$debs/$deb" "$tree" ;;
        esac
    done
    from=$(echo "$new"/kernel/lib/modules/* "$new"/kernel/usr/lib/modules/*)
    for version in $from; do [ -d "$version" ] && from=$version; done
    version=${from##*/}
    mv "$from/vmlinuz" "$new/vmlinuz" 2>/dev/null || mv "$new"/kernel/boot/vmlinuz-* "$new/vmlinuz"
    # the usual path with a merged /usr; BPF programs read it
    mkdir -p "$tree/usr/lib/modules/$version"
    cp "$from/config" "$tree/usr/lib/modules/$version/config" 2>/dev/null ||
        cp "$new"/kernel/boot/config-* "$tree/usr/lib/modules/$version/config" || die "the kernel's packages have no config"
    # busybox of the guests, which also makes the archive below
    "$busybox" depmod -b "${from%/lib/modules/*}" "$version" 2>/dev/null
    for module in $(needed "$from"); do
        mkdir -p "$tree/usr/lib/modules/$version/$(dirname "$module")"
        case $module in
            *.xz) xz -dc "$from/$module" >"$tree/usr/lib/modules/$version/${module%.xz}" ;;
            *) cp "$from/$module" "$tree/usr/lib/modules/$version/$module" ;;
        esac
    done
    "$busybox" depmod -b "$tree/usr" "$version"
    cp "$busybox" "${own[@]}" "$tree/usr/bin/"
    for module in $("$busybox" --list); do
        [ -e "$tree/usr/bin/$module" ] || [ -e "$tree/usr/sbin/$module" ] || ln -s busybox "$tree/usr/bin/$module"
    done
    cp "$root"/etc/{passwd,group,nsswitch.conf,hosts} "$tree/etc/"
    ln -sfn /proc/mounts "$tree/etc/mtab"
    ln -sfn usr/bin/viola-guest "$tree/init"
    cat >"$tree/boot" <<'BOOT'
#!/bin/busybox sh
# Does what init and udev of a real VM do first: load drivers, name the ports.
export PATH=/usr/sbin:/usr/bin
mount -t devtmpfs devtmpfs /dev
mount -t proc proc /proc
mount -t sysfs sysfs /sys
for module in virtio_pci virtio_console virtio_blk virtiofs; do modprobe $module 2>/dev/null; done
# a guest of a lab: it goes on in the lab's root, which has no drivers
root= more=
for word in $(cat /proc/cmdline); do
    case $word in
        viola.root=*) root=${word#*=} ;;
        viola.modules=*) more=$(echo "${word#*=}" | tr , ' ') ;;
    esac
done
if [ -n "$root" ]; then
    for module in virtio_net virtio_rng nvme ext4 xfs fuse af_packet $more; do modprobe $module 2>/dev/null; done
fi
mkdir -p /dev/virtio-ports
for try in 1 2 3 4 5 6 7 8 9 10; do
    for port in /sys/class/virtio-ports/*; do
        read -r name <$port/name && ln -sfn ../${port##*/} /dev/virtio-ports/$name
    done 2>/dev/null
    [ -e /dev/virtio-ports/org.viola.lab.0 ] && break
    usleep 100000
done
for disk in /sys/block/vd*; do
    [ -n "$root" ] && [ "$(cat $disk/serial)" = "$root" ] && mount -t ext4 -o ro /dev/${disk##*/} /mnt
done
umount /proc /sys
[ -z "$root" ] || { umount /dev; exec switch_root /mnt /init; }
exec /init
BOOT
    chmod 755 "$tree/boot"
    (cd "$tree" && find . -print | "$busybox" cpio -o -H newc 2>/dev/null) | gzip -1 >"$new/initrd.img"
    rm -rf "$new/kernel" "$new/root"
    if [ $kind = cloud ]; then
        say "making the disk of the lab's root"
        /usr/sbin/mkfs.ext4 -q -d "$root" "$new/root.img" 512M
    fi
    cp "$debs/PACKAGES" "$new/PACKAGES"
    stamp >"$new/STAMP"
    (cd "$new" && sha256sum vmlinuz initrd.img >MANIFEST)
    rm -rf "$qemu/$kind.old"
    [ ! -e "$qemu/$kind" ] || mv -T "$qemu/$kind" "$qemu/$kind.old"
    mv -T "$new" "$qemu/$kind"
    rm -rf "$qemu/$kind.old"
}

# What an image depends on: this script, the packages, viola's programs.
stamp() {
    sha256sum "$top/scripts/qemu-image.sh" "$debs/PACKAGES" "$busybox" "${own[@]}" | cut -d' ' -f1
    echo "$root"
}

image_good() {
    [ -s "$qemu/$kind/MANIFEST" ] && (cd "$qemu/$kind" && sha256sum -c --quiet MANIFEST >/dev/null 2>&1) &&
        [ "$(stamp)" = "$(cat "$qemu/$kind/STAMP")" ]
}

debs=$qemu/debs-$kind
# Whether all tools are among the packages; an older image may lack them.
has_tools() {
    local tool
    for tool in "${tools[@]}"; do grep -q " $tool " "$debs/PACKAGES" || return 1; done
}

# Whether the package with the kernel's configuration was fetched, for kernels in several packages.
has_config() {
    ! grep -q ' linux-binary-' "$debs/PACKAGES" || grep -q ' linux-base-[0-9]' "$debs/PACKAGES"
}

if [ $update = yes ] || ! debs_good "$debs" || ! has_tools || ! has_config; then
    index
    more=()
    [ ${#tools[@]} -eq 0 ] || mapfile -t more < <(closure "${tools[@]}")
    mapfile -t kernels < <(kernel)
    fetch "$debs" "${kernels[@]}" "${more[@]}"
fi
if [ $update = yes ] || ! debs_good "$qemu/debs-program"; then
    index
    mapfile -t more < <(closure qemu-system-x86)
    fetch "$qemu/debs-program" "${more[@]}"
fi
for folder in "$debs" "$qemu/debs-program"; do
    debs_good "$folder" || die "the fetched packages do not match their checksums; remove $folder and try again"
done
{ grep -qF "$mend" "$qemu/program/STAMP" && sha256sum -c --quiet "$qemu/program/STAMP"; } >/dev/null 2>&1 || build_program
image_good || build
say "ready: $(awk '$3 ~ /^linux-image/ {print $3}' "$qemu/$kind/PACKAGES"), $(awk '$3 == "qemu-system-x86" {print "QEMU " $4}' "$qemu/debs-program/PACKAGES"), in ${qemu#"$top"/}"
