#!/bin/bash
# SPDX-License-Identifier: Apache-2.0
# check-deb.sh VIOLA.deb AGENT.deb: checks the files of both packages and, as root, installs, upgrades and purges them.
#
# It installs them over a copy of this system in memory, in a mount namespace of its own; this system does not change.
set -euo pipefail
cd "$(dirname "$0")/.."

die() {
    printf 'check-deb: %s\n' "$*" >&2
    exit 1
}
[ $# -eq 2 ] || die "give two packages"
viola=$(realpath "$1") agent=$(realpath "$2")

# MODE OWNER PATH of all files, sorted
list() {
    dpkg-deb -c "$1" | awk '$1 !~ /^d/ { sub("^0/0$", "root/root", $2); print $1, $2, $6 }' | sort -k3
}

compare() { # NAME, with the wanted list on stdin
    diff -u <(sort -k3) <(list "$2") >&2 || die "$1 has unexpected or missing files (- wanted, + found)"
}

pages=$(cd build/deb/man && for page in *.1; do
    echo "-rw-r--r-- root/root ./usr/share/man/man1/$page.gz"
done)
compare viola "$viola" <<END
-rwxr-xr-x root/root ./usr/bin/viola
-rw-r--r-- root/root ./etc/viola/viola.toml
-rw-r--r-- root/root ./usr/lib/systemd/system/viola.service
-rw-r--r-- root/root ./usr/share/bash-completion/completions/viola
-rw-r--r-- root/root ./usr/share/fish/vendor_completions.d/viola.fish
-rw-r--r-- root/root ./usr/share/zsh/vendor-completions/_viola
-rw-r--r-- root/root ./usr/share/doc/viola/README.md
-rw-r--r-- root/root ./usr/share/doc/viola/changelog.Debian.gz
-rw-r--r-- root/root ./usr/share/doc/viola/copyright
-rw-r--r-- root/root ./usr/share/doc/viola/grafana.json
-rw-r--r-- root/root ./usr/share/doc/viola/viola.cdx.json
-rw-r--r-- root/root ./usr/share/doc/viola/vms.schema.json
$pages
END
compare viola-agent "$agent" <<END
-rwxr-xr-x root/root ./usr/bin/viola-agent
-rw-r--r-- root/root ./etc/viola/agent.toml
-rw-r--r-- root/root ./usr/lib/systemd/system/viola-agent.service
-rw-r--r-- root/root ./usr/lib/libvpipe_preload.so
-rw-r--r-- root/root ./usr/share/java/viola-hdfs.jar
-rw-r--r-- root/root ./usr/share/doc/viola-agent/changelog.Debian.gz
-rw-r--r-- root/root ./usr/share/doc/viola-agent/copyright
-rw-r--r-- root/root ./usr/share/doc/viola-agent/libvpipe-preload.cdx.json
-rw-r--r-- root/root ./usr/share/doc/viola-agent/viola-agent.cdx.json
-rw-r--r-- root/root ./usr/share/man/man8/viola-agent.8.gz
END

field() {
    dpkg-deb -f "$1" "$2"
}
[ "$(field "$viola" Architecture)" = amd64 ] || die "viola is not for amd64"
for library in libc6 libelf1 zlib1g; do
    field "$viola" Depends | grep -q "$library" || die "viola does not depend on $library"
done
[ "$(dpkg-deb --ctrl-tarfile "$viola" | tar -xO ./conffiles)" = /etc/viola/viola.toml ] ||
    die "the configuration of viola is not a conffile"
[ "$(dpkg-deb --ctrl-tarfile "$agent" | tar -xO ./conffiles)" = /etc/viola/agent.toml ] ||
    die "the configuration of viola-agent is not a conffile"
# the unit must restore the host after a crash
grep -qx 'ExecStopPost=/usr/bin/viola restore --keep-workers' dist/viola.service || die "the unit does not run viola restore"
for script in postinst prerm; do
    dpkg-deb --ctrl-tarfile "$viola" | tar -xO "./$script" | grep -q viola.service || die "$script of viola does not handle its service"
done

unpacked=$(mktemp -d)
trap 'rm -rf "$unpacked"' EXIT
dpkg-deb -x "$viola" "$unpacked"
dpkg-deb -x "$agent" "$unpacked"
for program in viola viola-agent; do
    file=$unpacked/usr/bin/$program
    readelf -S "$file" | grep -q '\.debug_info' && die "$program is not stripped"
done
"$unpacked/usr/bin/viola" check --config "$unpacked/etc/viola/viola.toml" --socket /nonexistent >/dev/null ||
    die "the sample configuration is not valid"
if command -v systemd-analyze >/dev/null; then
    for unit in viola:5.5 viola-agent:7.0; do
        most=${unit#*:} unit=${unit%:*}.service
        systemd-analyze security --offline=true --threshold="$(awk "BEGIN { print $most * 10 }")" "dist/$unit" >/dev/null ||
            die "$unit has an exposure above $most (systemd-analyze security)"
    done
fi
if command -v lintian >/dev/null; then
    lintian --fail-on error "$viola" "$agent" || die "lintian reports errors"
fi

[ "$(id -u)" = 0 ] || {
    echo "check-deb: not root, so nothing was installed"
    exit 0
}
export viola agent
timeout 300 unshare --mount --pid --fork --net bash -euo pipefail <<'INNER' || die "the packages cannot be installed"
mount -t tmpfs none /mnt
mkdir /mnt/upper /mnt/work /mnt/root
mount -t overlay overlay -o lowerdir=/,upperdir=/mnt/upper,workdir=/mnt/work /mnt/root
mount -t tmpfs none /mnt/root/run
mount -t proc none /mnt/root/proc
mount --rbind /dev /mnt/root/dev
mount --rbind /sys /mnt/root/sys
cp "$viola" "$agent" /mnt/root/run/
inside() { chroot /mnt/root env DEBIAN_FRONTEND=noninteractive PATH=/usr/sbin:/usr/bin:/sbin:/bin "$@"; }
inside dpkg -i "/run/${viola##*/}" "/run/${agent##*/}" >/dev/null
for group in viola viola-read; do
    inside getent group "$group" >/dev/null || { echo "the group $group is missing"; exit 1; }
done
inside viola --version >/dev/null
inside viola check >/dev/null
inside test -e /etc/systemd/system/multi-user.target.wants/viola.service || { echo "viola is not enabled"; exit 1; }
inside test ! -e /etc/systemd/system/multi-user.target.wants/viola-agent.service || { echo "viola-agent is enabled"; exit 1; }
# an upgrade and a removal keep the operator's configuration, a purge removes it
echo '# mine' >>/mnt/root/etc/viola/viola.toml
inside dpkg -i "/run/${viola##*/}" >/dev/null
grep -q '^# mine$' /mnt/root/etc/viola/viola.toml || { echo "an upgrade replaced the configuration"; exit 1; }
mkdir -p /mnt/root/var/lib/viola
inside dpkg -r viola viola-agent >/dev/null
test ! -e /mnt/root/usr/bin/viola
grep -q '^# mine$' /mnt/root/etc/viola/viola.toml || { echo "a removal deleted the configuration"; exit 1; }
inside dpkg -P viola viola-agent >/dev/null
test ! -e /mnt/root/etc/viola/viola.toml
test ! -e /mnt/root/var/lib/viola
INNER
echo "check-deb: both packages have the expected files, and were installed, upgraded, removed and purged"
