#!/bin/bash
# SPDX-License-Identifier: Apache-2.0
# measure-rxe.sh [MIB]: compares software RDMA (rxe) with TCP in one QEMU guest with one vCPU: instructions per GiB.
#
# Only the two ends of the transfer run in the guest. QEMU derives the guest's clock from executed instructions, one per
# nanosecond, so that neither the speed nor the load of this host changes the figures. rxe sends to itself within one
# device, without a network stack: this is its best case. TCP uses the guest's own addresses.
set -euo pipefail
cd "$(dirname "$0")/.."
mib=${1:-64}
[[ $mib =~ ^[1-9][0-9]{0,4}$ ]] || { echo "measure-rxe: $mib is not a number of MiB from 1 to 99999" >&2; exit 2; }
[ -e build/lab/current/root/usr/bin/viola-guest ] || scripts/lab-image.sh
scripts/qemu-image.sh --rdma
image=build/qemu/rdma
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT

mkdir "$work/more"
cat >"$work/more/measure" <<'MEASURE'
#!/bin/busybox sh
export PATH=/usr/sbin:/usr/bin
mount -t devtmpfs devtmpfs /dev; mount -t proc proc /proc; mount -t sysfs sysfs /sys; mount -t tmpfs tmpfs /tmp
exec >/dev/ttyS0 2>&1
say() { echo "@ $*"; }
end() { say "$@"; poweroff -f; }
mib=$(sed 's/.*measure.mib=\([0-9]*\).*/\1/' /proc/cmdline)
for module in crc32_generic rdma_rxe ib_uverbs veth; do modprobe $module || end "failed: no module $module"; done
/usr/bin/ip link set lo up
/usr/bin/ip link add v0 type veth peer name v1
/usr/bin/ip addr add 10.9.0.1/24 dev v0
/usr/bin/ip link set v0 mtu 9000 up; /usr/bin/ip link set v1 mtu 9000 up
sleep 3
rdma link add rxe0 type rxe netdev v0 || end "failed: no rxe device"
gid=; for n in 0 1 2 3; do
    grep -q '0a09:0001$' /sys/class/infiniband/rxe0/ports/1/gids/$n && gid=$n
done
[ -n "$gid" ] || end "failed: rxe has no address"
# busy jiffies of the CPU since boot
busy() { awk '$1 == "cpu" {print $2 + $3 + $4 + $7 + $8}' /proc/stat; }
# measures the cost of a transfer: NAME SERVER CLIENT
transfer() {
    name=$1 server=$2 client=$3
    $server >/tmp/server 2>&1 &
    pid=$!
    sleep 2
    before=$(busy) begin=$(cut -d' ' -f1 /proc/uptime)
    $client >/tmp/client 2>&1 || end "failed: $name: $(tail -3 /tmp/client | tr '\n' ' ')"
    after=$(busy) now=$(cut -d' ' -f1 /proc/uptime)
    kill $pid 2>/dev/null; wait $pid 2>/dev/null
    awk -v n=$name -v m=$mib -v b=$before -v a=$after -v s=$begin -v e=$now \
        'BEGIN {printf "@ %-10s %8.1f G instructions per GiB %8.1f MiB/s\n", n, (a - b) / 100 / m * 1024, m / (e - s)}'
}
count=$((mib * 16))
for round in 1 2; do
    transfer "TCP" "iperf3 -s -1" "iperf3 -c 10.9.0.1 -n ${mib}M -l 64K"
    for what in send read write; do
        test="ib_${what}_bw -d rxe0 -x $gid -m 4096 -s 65536 -n $count -F"
        transfer "rxe-$what" "$test" "$test 10.9.0.1"
    done
done
end "done"
MEASURE
chmod 755 "$work/more/measure"
busybox=build/lab/current/root/usr/bin/busybox
(cd "$work/more" && echo measure | "$OLDPWD/$busybox" cpio -o -H newc 2>/dev/null | gzip -1) >"$work/more.img"
cat $image/initrd.img "$work/more.img" >"$work/initrd.img"
echo "$mib MiB in messages of 64 KiB, one vCPU of 1 G instructions/s, $(awk '$3 ~ /^linux-image/ {print $3}' $image/PACKAGES):"
timeout 900 taskset -c "$(($(nproc) - 1))" build/qemu/program/root/usr/bin/qemu-system-x86_64 -accel tcg -icount shift=0 -cpu max -machine q35 \
    -smp 1 -m 768 -nodefaults -no-user-config -display none -no-reboot -serial "file:$work/log" \
    -kernel $image/vmlinuz -initrd "$work/initrd.img" \
    -append "console=ttyS0 rdinit=/measure mitigations=off tsc=reliable quiet panic=-1 measure.mib=$mib" </dev/null
sed -n 's/^@ //p' "$work/log" | tr -d '\r' | grep -v '^done$' || true
grep -q '^@ done' "$work/log" || { tail -20 "$work/log" >&2; echo "measure-rxe: the guest did not finish" >&2; exit 1; }
