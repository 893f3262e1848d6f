#!/bin/bash
# SPDX-License-Identifier: Apache-2.0
# debian-image.sh [--update]: makes a Debian host of VMs for a test bed, under build/qemu/debian.
#
#   scripts/debian-image.sh           make what is missing or older than its packages and viola-guest
#   scripts/debian-image.sh --update  look in the archive for newer packages
#
# Debian trixie with systemd, libvirt, QEMU and nginx as its packages configure them; kernel of trixie-backports, with KVM on
# an emulated AMD processor. The script configures the packages when it makes the image, because an emulated PC needs
# minutes for it. apt fetches them into a private state (see private-apt.sh); dpkg runs in a root and namespaces of its
# own. Guests of that host are in /srv/guests: a kernel and an initramfs with busybox, which answers pings and burns CPU
# on request.
# Results: vmlinuz, initrd.img, root.img (ext4); MANIFEST has their SHA-256, PACKAGES where they are from.
set -euo pipefail
umask 022

top=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
lab=${VIOLA_LAB_BUILD:-$top/build/lab}
qemu=${VIOLA_QEMU_BUILD:-$top/build/qemu}
state=$qemu/apt
. "$top/scripts/private-apt.sh"

say() { printf 'debian-image: %s\n' "$*"; }
die() { printf 'debian-image: %s\n' "$*" >&2; exit 1; }

update=no
case ${1-} in
    '') ;;
    --update) update=yes ;;
    -h | --help) sed -n '3,6s/^# \{0,1\}//p' "$0"; exit 0 ;;
    *) die "unknown option $1; see --help" ;;
esac
[ "$(id -u)" = 0 ] || die "the packages' own scripts run as root, in a root of their own; run this as root"
busybox=$lab/current/root/usr/bin/busybox
for kind in cloud lanes; do
    [ -s "$qemu/$kind/MANIFEST" ] || die "there is no $qemu/$kind yet; run scripts/qemu-image.sh, and again with --lanes"
done

packages=(systemd systemd-sysv systemd-container udev dbus kmod libvirt-daemon-system libvirt-clients
    libvirt-daemon-driver-qemu qemu-system-x86 iproute2 iputils-ping curl adduser procps busybox-static apt nginx)
# Modules of that host's kernel, and of its guests' kernel.
modules=(virtio_pci virtio_blk virtio_console virtio_net virtio_rng ext4 bridge veth tun vhost_net kvm_amd autofs4 af_packet)
guest_modules=(virtio_pci virtio_net af_packet)

mkdir -p "$qemu"
exec 9>"$qemu/.lock"
flock 9
debs=$qemu/debs-debian

debs_good() {
    [ "$(cat "$debs/WANTED" 2>/dev/null)" = "${packages[*]}" ] && [ -s "$debs/PACKAGES" ] && (cd "$debs" && awk '{print $1 "  " $2}' PACKAGES | sha256sum -c --quiet >/dev/null 2>&1)
}

fetch() {
    local new=$debs.new deb names
    private_index trixie trixie-backports
    rm -rf "$new"
    mkdir -p "$new"
    mapfile -t names < <(private_apt install --print-uris --no-install-recommends '?essential' "${packages[@]}" |
        sed -nE "s/^'[^']*' ([^_ ]+)_.*/\1/p")
    [ ${#names[@]} -gt 100 ] || die "the archive does not have what this Debian needs"
    say "fetching ${#names[@]} packages"
    (cd "$new" && private_apt download "${names[@]}")
    for deb in "$new"/*.deb; do
        printf '%s %s %s %s %s\n' "$(sha256sum "$deb" | cut -d' ' -f1)" "${deb##*/}" "$(dpkg-deb -f "$deb" Package)" \
            "$(dpkg-deb -f "$deb" Version)" "$(dpkg-deb -f "$deb" Essential | grep -o yes || echo no)"
    done >"$new/PACKAGES"
    echo "${packages[*]}" >"$new/WANTED"
    rm -rf "$debs"
    mv -T "$new" "$debs"
}

# Modules and their dependencies, by the names in $1/modules.dep.
needed() {
    awk -v wanted="${*:2}" '
        { name = $1; sub(/:$/, "", name); key = name; sub(/.*\//, "", key); sub(/\.ko.*/, "", key)
          gsub(/-/, "_", key); of[key] = name; deps[name] = $0; sub(/^[^ ]*: ?/, "", deps[name]) }
        END { n = split(wanted, w, " ")
              for (i = 1; i <= n; i++) if (w[i] in of) { print of[w[i]]; m = split(deps[of[w[i]]], d, " ")
                  for (j = 1; j <= m; j++) print d[j] } }' "$1/modules.dep" | sort -u
}

# take_modules KIND ROOT MODULES...: copies modules of the kernel of that kind into a root.
take_modules() {
    local kind=$1 to=$2 from version module deb
    shift 2
    if [ ! -d "$new/kernel-$kind" ]; then
        mkdir "$new/kernel-$kind"
        for deb in "$qemu/debs-$kind"/linux-*.deb; do dpkg-deb -x "$deb" "$new/kernel-$kind"; done
    fi
    from=$(find "$new/kernel-$kind" -path '*/lib/modules/*' -maxdepth 5 -name '[0-9]*' -type d | sed -n 1p)
    version=${from##*/}
    "$busybox" depmod -b "${from%/lib/modules/*}" "$version" 2>/dev/null
    for module in $(needed "$from" "$@"); do
        mkdir -p "$to/usr/lib/modules/$version/$(dirname "$module")"
        case $module in
            *.xz) xz -dc "$from/$module" >"$to/usr/lib/modules/$version/${module%.xz}" ;;
            *) cp "$from/$module" "$to/usr/lib/modules/$version/$module" ;;
        esac
    done
    cp "$from"/modules.builtin* "$to/usr/lib/modules/$version/" 2>/dev/null || true
    "$busybox" depmod -b "$to/usr" "$version"
}

# An initramfs with busybox, modules and a script: initramfs FILE KIND SCRIPT-FILE MODULES...
initramfs() {
    local file=$1 kind=$2 script=$3 tree name
    shift 3
    tree=$(mktemp -d "$new/tree.XXXXXX")
    mkdir -p "$tree"/{dev,proc,sys,root,usr/bin,usr/lib}
    for name in bin lib; do ln -s "usr/$name" "$tree/$name"; done
    ln -s usr/bin "$tree/sbin"
    take_modules "$kind" "$tree" "$@"
    cp "$busybox" "$tree/usr/bin/busybox"
    for name in $("$busybox" --list); do [ -e "$tree/usr/bin/$name" ] || ln -s busybox "$tree/usr/bin/$name"; done
    install -m 755 "$script" "$tree/boot"
    ln -s boot "$tree/init"
    (cd "$tree" && find . -print | "$busybox" cpio -o -H newc 2>/dev/null) | gzip -1 >"$file"
    rm -r "$tree"
}

# Unpacks and configures all packages, by dpkg inside the root.
install_packages() {
    local root=$1 deb name
    mkdir -p "$root"/usr/{bin,sbin,lib,lib64} "$root"/var/cache/debs "$root"/{dev,proc,sys,run,tmp}
    for name in bin sbin lib lib64; do ln -s "usr/$name" "$root/$name"; done
    # enough to run dpkg and shells; dpkg then installs the same files once more and registers them
    awk '{print $2}' "$debs/PACKAGES" | while read -r deb; do
        dpkg-deb --fsys-tarfile "$debs/$deb" | tar -x -C "$root" --keep-directory-symlink
    done
    mkdir -p "$root/var/lib/dpkg/info" "$root/var/lib/dpkg/updates"
    : >"$root/var/lib/dpkg/status"
    printf '#!/bin/sh\nexit 101\n' >"$root/usr/sbin/policy-rc.d"
    chmod 755 "$root/usr/sbin/policy-rc.d"
    cp "$root/usr/share/base-passwd/passwd.master" "$root/etc/passwd"
    cp "$root/usr/share/base-passwd/group.master" "$root/etc/group"
    mount --bind "$debs" "$root/var/cache/debs"
    mount -t tmpfs none "$root/run"
    mount -t tmpfs none "$root/dev"
    for name in null:3 zero:5 full:7 random:8 urandom:9; do mknod -m 666 "$root/dev/${name%:*}" c 1 "${name#*:}"; done
    ln -s /proc/self/fd "$root/dev/fd"
    mount -t proc proc "$root/proc"
    inside() { chroot "$root" env -i DEBIAN_FRONTEND=noninteractive LC_ALL=C PATH=/usr/sbin:/usr/bin HOME=/root "$@"; }
    inside ldconfig
    inside dpkg --force-all --force-confnew --unpack --recursive /var/cache/debs
    inside dpkg --force-depends --force-confnew --configure libc6 mawk base-passwd base-files
    inside dpkg --force-confnew --configure --pending
    inside dpkg --audit
    umount "$root/proc" "$root/dev" "$root/run" "$root/var/cache/debs"
}

build() {
    local root
    new=$qemu/.new.debian
    rm -rf "$new"
    mkdir -p "$new/root"
    root=$new/root
    if [ "$(installed_stamp)" = "$(cat "$debs/installed.stamp" 2>/dev/null)" ]; then
        tar -x -f "$debs/installed.tar" -C "$root"
    else
        say "installing $(wc -l <"$debs/PACKAGES") packages into a root"
        export -f install_packages
        export debs root
        unshare --mount --pid --fork --uts --ipc --net bash -euo pipefail -c 'mount --make-rprivate /; install_packages "$root"' \
            >"$new/dpkg.log" 2>&1 || { tail -n 30 "$new/dpkg.log" >&2; die "the packages cannot be installed; all of it is in $new/dpkg.log"; }
        rm -f "$root/usr/sbin/policy-rc.d"
        rmdir "$root/var/cache/debs"
        rm -rf "$root"/usr/share/{doc,man,locale,info,lintian}/* "$root"/var/cache/apt/*.bin
        tar -c -f "$debs/installed.tar" -C "$root" .
        installed_stamp >"$debs/installed.stamp"
    fi
    say "making the host's and its guests' initramfs"
    take_modules lanes "$root" "${modules[@]}"
    chroot "$root" depmod "$(ls "$root/usr/lib/modules")"
    settle "$root"
    cp "$qemu/lanes/vmlinuz" "$new/vmlinuz"
    boot_script >"$new/boot"
    initramfs "$new/initrd.img" lanes "$new/boot" virtio_pci virtio_blk ext4
    mkdir -p "$root/srv/guests"
    cp "$qemu/cloud/vmlinuz" "$root/srv/guests/vmlinuz"
    guest_script >"$new/boot"
    initramfs "$root/srv/guests/initrd.img" cloud "$new/boot" "${guest_modules[@]}"
    say "making the disk"
    truncate -s 2560M "$new/root.img"
    mkfs.ext4 -q -L debian -O ^has_journal -E lazy_itable_init=1 -m 0 -d "$root" "$new/root.img"
    rm -rf "$root" "$new/boot" "$new"/kernel-*
    cp "$debs/PACKAGES" "$new/PACKAGES"
    stamp >"$new/STAMP"
    (cd "$new" && sha256sum vmlinuz initrd.img root.img >MANIFEST)
    rm -rf "$qemu/debian"
    mv -T "$new" "$qemu/debian"
}

# What the installed root depends on. The root is kept, because making it takes most of the time.
installed_stamp() {
    { declare -f install_packages; cat "$debs/PACKAGES"; } | sha256sum | cut -d' ' -f1
}

# Settings that an installer and an operator would make.
settle() {
    local root=$1 unit
    echo debian >"$root/etc/hostname"
    printf '127.0.0.1 localhost\n127.0.1.1 debian\n' >"$root/etc/hosts"
    echo '/dev/vda / ext4 defaults,noatime 0 0' >"$root/etc/fstab"
    printf 'kvm_amd\ntun\nbridge\nvhost_net\n' >"$root/etc/modules-load.d/host.conf"
    rm -f "$root/etc/machine-id"
    echo 0123456789abcdef0123456789abcdef >"$root/etc/machine-id"
    # services that an emulated PC would only wait for
    for unit in apt-daily.timer apt-daily-upgrade.timer dpkg-db-backup.timer e2scrub_all.timer e2scrub_reap.service \
        fstrim.timer logrotate.timer man-db.timer getty@tty1.service systemd-pcrlock.socket systemd-hwdb-update.service \
        systemd-binfmt.service libvirt-guests.service virtlockd.socket systemd-vconsole-setup.service \
        systemd-update-utmp.service dev-hugepages.mount; do
        ln -sf /dev/null "$root/etc/systemd/system/$unit"
    done
    install -m 755 "$lab/current/root/usr/bin/viola-guest" "$root/usr/bin/viola-guest"
    cat >"$root/etc/systemd/system/lab.service" <<'UNIT'
[Unit]
Description=Runs scripts of the test bed
After=dbus.service systemd-logind.service libvirtd.socket
StartLimitIntervalSec=0
[Service]
# without its port the program takes a serial line, as in a UML guest
ExecStartPre=/bin/sh -c 'until [ -e /dev/virtio-ports/org.viola.lab.0 ]; do sleep 0.2; done'
ExecStart=/usr/bin/viola-guest serve
# the lab may reconnect; processes that scripts start outlive this service
Restart=always
RestartSec=500ms
KillMode=process
Delegate=yes
StandardOutput=journal+console
[Install]
WantedBy=multi-user.target
UNIT
    mkdir -p "$root/etc/systemd/system/multi-user.target.wants" "$root/etc/systemd/journald.conf.d"
    ln -sf /etc/systemd/system/lab.service "$root/etc/systemd/system/multi-user.target.wants/lab.service"
    printf '[Journal]\nStorage=volatile\nForwardToConsole=no\n' >"$root/etc/systemd/journald.conf.d/lab.conf"
}

# Mounts the disk and starts the init on it.
boot_script() {
    cat <<'BOOT'
#!/bin/busybox sh
export PATH=/usr/bin
mount -t devtmpfs dev /dev
mount -t proc proc /proc
mount -t sysfs sys /sys
for module in virtio_pci virtio_blk ext4; do modprobe $module; done
for try in 1 2 3 4 5 6 7 8 9 10; do [ -b /dev/vda ] && break; usleep 200000; done
mount -t ext4 /dev/vda /root || exec sh
umount /sys /proc
mount --move /dev /root/dev
exec switch_root /root /usr/lib/systemd/systemd "$@"
BOOT
}

# Init of a small guest: sets an address, and burns CPU from a `busy` on TCP port 9 until an `idle`.
guest_script() {
    cat <<'BOOT'
#!/bin/busybox sh
export PATH=/usr/bin
mount -t devtmpfs dev /dev
mount -t proc proc /proc
mount -t sysfs sys /sys
for module in virtio_pci virtio_net; do modprobe $module; done
for word in $(cat /proc/cmdline); do case $word in address=*) address=${word#*=} ;; esac; done
ip link set lo up
ip addr add $address/24 dev eth0
ip link set eth0 up
printf '%s\n' '#!/bin/busybox sh' 'read word; case $word in busy) : >/busy ;; idle) rm -f /busy ;; esac; echo $word' >/hear
chmod 755 /hear
nc -ll -p 9 -e /hear &
echo "READY $address"
while :; do
    if [ -e /busy ]; then
        n=0
        while [ $n -lt 20000 ]; do n=$((n + 1)); done
    else
        usleep 100000
    fi
done
BOOT
}

stamp() {
    sha256sum "$top/scripts/debian-image.sh" "$debs/PACKAGES" "$lab/current/root/usr/bin/viola-guest" "$busybox" \
        "$qemu"/{lanes,cloud}/vmlinuz | cut -d' ' -f1
}

image_good() {
    [ -s "$qemu/debian/MANIFEST" ] && (cd "$qemu/debian" && sha256sum -c --quiet MANIFEST >/dev/null 2>&1) &&
        [ "$(stamp)" = "$(cat "$qemu/debian/STAMP")" ]
}

if [ $update = yes ] || ! debs_good; then fetch; fi
debs_good || die "the fetched packages do not match their checksums; remove $debs and try again"
image_good || build
say "ready: $(awk '$3 == "libvirt-daemon" {print "libvirt " $4}' "$qemu/debian/PACKAGES"), $(awk '$3 == "systemd" {print "systemd " $4}' "$qemu/debian/PACKAGES"), in ${qemu#"$top"/}/debian"
