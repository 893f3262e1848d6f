// SPDX-License-Identifier: Apache-2.0
//! A nested QEMU guest with KVM: its VF is passed through by vfio-pci, plugged and unplugged, with net_failover in
//! it, or a bond by viola-agent.

use std::path::Path;
use std::process::Command;
use std::time::{Duration, Instant};

use serde_json::{Value, json};

use super::host::{Host, image};

/// Switches of each kind.
const TURNS: usize = 8;

/// A host with an IOMMU and KVM, both emulated.
const IOMMU: &str =
    "-machine kernel-irqchip=split -device intel-iommu,intremap=on,caching-mode=on,device-iotlb=on";

/// What a guest's init does here: its pair has an address, and a server of traffic runs.
const INIT: &str = r"#!/usr/bin/busybox sh
export PATH=/usr/sbin:/usr/bin
mount -t proc p /proc; mount -t sysfs s /sys; mount -t devtmpfs d /dev; mount -t tmpfs t /run
for m in virtio_pci virtio_console net_failover bonding virtio_net igbvf pciehp af_packet; do modprobe $m; done
sleep 1
echo 1 >/proc/sys/net/ipv6/conf/all/disable_ipv6; echo 1 >/proc/sys/net/ipv6/conf/default/disable_ipv6
for d in /sys/class/net/*; do
    d=${d##*/}
    case $d in bond*) continue ;; esac
    [ $d = lo ] || [ -e /sys/class/net/$d/master ] || { ip link set $d up; ip addr add 10.9.0.2/24 dev $d; echo address on $d; }
done
ip link set lo up
now() { read up rest </proc/uptime; echo $up; }
PAIR
echo L2 READY
/viola/bin/viola internal traffic serve
echo L2 ENDED; sleep 1000
";

/// By net_failover.
const FAILOVER: &str = r"
driver=/sys/bus/pci/drivers/igbvf
# what letting a VF go costs this guest's own kernel, with nobody else in it: once, with the first one
(until [ -e $driver/0000:* ]; do sleep 0.2; done; sleep 3
 for d in $driver/0000:*; do d=${d##*/}; a=$(now); echo $d >$driver/unbind; echo CONTROL $a to $(now); echo $d >$driver/bind; done) &
";

/// By viola-agent.
const AGENT: &str = r#"
for p in /sys/class/virtio-ports/*; do read -r name <$p/name && [ $name = org.viola.lane.0 ] && port=/dev/${p##*/}; done
printf '[lane]\nport = "%s"\n' $port >/run/agent.toml
viola-agent --config /run/agent.toml &
until [ -e /sys/class/net/viola0 ] && ip addr show viola0 | grep -q 10.9.0.2; do sleep 0.2; done
viola-agent --config /run/agent.toml status
"#;

/// How a guest keeps its two NICs together.
#[derive(Clone, Copy, PartialEq)]
enum Pair {
    Failover,
    Agent,
}

/// QEMU and its libraries, packed; they are looked for where they were made.
fn pack(folder: &Path) -> std::path::PathBuf {
    let image = image();
    let program = image.program();
    let root = program.ancestors().nth(3).unwrap();
    let archive = folder.join("qemu.tar");
    let parts = ["vmlinuz", "initrd.img"].map(|f| image.kernel().with_file_name(f));
    let status = Command::new("tar")
        .args([
            "-cf",
            archive.to_str().unwrap(),
            "--exclude=./usr/share/doc",
            "--transform=s,^\\./,q/root/,S",
        ])
        .args(["--transform=s,.*/\\(vmlinuz\\|initrd.img\\)$,q/\\1,S", "-P"])
        .args(parts)
        .args(["-C", root.to_str().unwrap(), "."])
        .status()
        .unwrap();
    assert!(status.success());
    archive
}

/// The root folder by which the program names its loader.
fn root_of_loader() -> String {
    let program = std::fs::read(image().program()).unwrap();
    let wanted = b"/usr/lib64/ld-linux-x86-64.so.2";
    let at = program
        .windows(wanted.len())
        .position(|w| w == wanted)
        .unwrap();
    let begin = program[..at].iter().rposition(|&b| b == 0).unwrap() + 1;
    String::from_utf8(program[begin..at].to_vec()).unwrap()
}

#[test]
#[ignore = "boots an emulated PC: make test-beds"]
fn a_nested_guests_vf_comes_and_goes_under_its_agents_bond_and_nothing_is_held_up() {
    let bed = Bed::boot("lanes-agent", Pair::Agent);
    let calm = bed.fastest();
    let (lost, gaps) = bed.to_and_fro(calm.rate);
    // A bar: at most one ping of 50 ms in each, and no gap over 100 ms beside what there is without any switch.
    let pings = |packets: u64| packets * 20 / u64::from(calm.rate);
    assert!(
        lost.iter().all(|n| pings(*n) <= 1),
        "{lost:?} of {}/s",
        calm.rate
    );
    let most = GAP_MS + calm.gap_ms;
    assert!(
        gaps.iter().all(|ms| *ms <= most),
        "{gaps:?}, and {:.0} ms without a switch",
        calm.gap_ms
    );
}

#[test]
#[ignore = "boots an emulated PC: make test-beds"]
fn a_nested_guests_vf_comes_and_goes_by_net_failover_and_its_connections_live() {
    let bed = Bed::boot("lanes-kvm", Pair::Failover);
    let control = control(&bed.host);
    bed.host.sh("viola set l2 --lane never");
    bed.host
        .wait("no VF", |l| l.nics.iter().all(|n| n.vf.is_none()));
    let rate = 100;
    let (lost, _) = bed.to_and_fro(rate);
    // One hole for each time that the VF is taken, none when it is given. QEMU's unplug is the guest's own failover, so a hole
    // is as long as the guest's kernel takes to let the VF go, which the control measures.
    println!("the guest's kernel alone takes {control:.2} s to let a VF go");
    assert!(lost.len() <= 2 * TURNS, "{lost:?}");
    // twice what its kernel takes, and a tenth of a second
    let most = ((2.0 * control + 0.1) * f64::from(rate)) as u64;
    assert!(
        lost.iter().all(|n| *n <= most),
        "{most}: {lost:?}\n{}",
        bed.host.log()
    );
}

/// Longest gap that a switch may make, ms.
const GAP_MS: f64 = 100.0;

/// Traffic without a switch.
struct Calm {
    /// Packets a second.
    rate: u32,
    /// Longest time without an answer, ms.
    gap_ms: f64,
}

struct Bed {
    host: Host,
}

impl Bed {
    fn boot(name: &str, pair: Pair) -> Self {
        let host = Host::boot_with(name, 0, |mut spec, folder| {
            spec.kernel_args.push("intel_iommu=on".into());
            let archive = pack(folder);
            spec.memory(3072).disk("qemu", &archive, "raw").arg(IOMMU)
        });
        let loader = root_of_loader();
        let init = INIT.replace("PAIR", if pair == Pair::Agent { AGENT } else { FAILOVER });
        let said = host.sh(&format!(
            "set -e; tar -x -f /dev/vdb -C /; mkdir -p $(dirname {loader}); ln -sfn /q/root {loader}; \
             for m in kvm_amd vfio_pci vfio_iommu_type1 tun; do modprobe $m; done; \
             mkdir /x; cd /x; cat >init2 <<'X'\n{init}X\nchmod 755 init2; cp -a /viola .; \
             find . | cpio -o -H newc 2>/dev/null | gzip -1 >/q/more; cat /q/initrd.img /q/more >/q/initrd2; rm -rf /x /q/more; \
             ip tuntap add tap0 mode tap; ip link set tap0 master br0 up; ls /dev/kvm; ls /sys/kernel/iommu_groups | wc -l; echo packed"
        ));
        assert!(
            said.contains("packed") && said.contains("/dev/kvm"),
            "{said}"
        );
        println!("{said}");
        host.configure("");
        // none before it is asked for: while the guest boots, a VF would be one more NIC
        host.sh("printf '[[vm]]\\nname = \"l2\"\\n[vm.lane]\\nset = \"never\"\\n' >>/tmp/v.toml");
        host.start();
        let q = "/q/root/usr";
        let (failover, port) = match pair {
            Pair::Failover => (",failover=on", ""),
            Pair::Agent => (
                "",
                "-device virtio-serial-pci -chardev socket,id=lane,path=/tmp/l2.lane,server=on,wait=off \
                 -device virtserialport,chardev=lane,name=org.viola.lane.0",
            ),
        };
        host.sh(&format!(
            "setsid {q}/bin/qemu-system-x86_64 -name guest=l2,debug-threads=on -L {q}/share/seabios -L {q}/share/qemu -L {q}/lib/ipxe/qemu \
             -machine q35 -accel kvm -cpu host -smp 1 -m 512 -nographic -nodefaults -no-reboot -serial file:/tmp/l2.log -monitor none \
             -qmp unix:/tmp/l2.a,server=on,wait=off -qmp unix:/tmp/l2.b,server=on,wait=off -qmp unix:/tmp/l2.c,server=on,wait=off \
             -device pcie-root-port,id=r1,chassis=1,slot=1 -device pcie-root-port,id=r2,chassis=2,slot=2 \
             -netdev tap,id=t0,ifname=tap0,script=no,downscript=no {port} \
             -device virtio-net-pci,netdev=t0,id=net1,bus=r1,mac=52:54:00:00:09:02{failover} \
             -kernel /q/vmlinuz -initrd /q/initrd2 \
             -append 'console=ttyS0 rdinit=/init2 mitigations=off net.ifnames=0 quiet loglevel=6 tsc=reliable no_timer_check' </dev/null >/tmp/l2.out 2>&1 &"
        ));
        let begin = Instant::now();
        loop {
            let said = host.sh("cat /tmp/l2.log /tmp/l2.out");
            if said.contains("L2 READY") {
                break;
            }
            assert!(
                begin.elapsed() < Duration::from_secs(150),
                "{said}\n{}",
                host.log()
            );
            std::thread::sleep(Duration::from_secs(1));
        }
        println!(
            "the nested guest is up after {:.0} s",
            begin.elapsed().as_secs_f32()
        );
        host.wait("the guest seen", |l| l.nics.iter().any(|n| n.name == "l2"));
        Self { host }
    }

    fn traffic(&self, rate: u32, seconds: u64) {
        let spec = json!({
            "address": "10.9.0.2", "phase_ms": seconds * 1000,
            "guests": [{"netns": "peer", "rates": [rate], "pieces": 10}],
        });
        self.host.sh(&format!(
            "rm -f /tmp/seen; (viola internal traffic '{spec}' >/tmp/traffic 2>&1; mv /tmp/traffic /tmp/seen) </dev/null >/dev/null 2>&1 &"
        ));
    }

    /// The fastest stream that this guest answers whole, with no VF; an emulated one cannot do with one packet each millisecond.
    fn fastest(&self) -> Calm {
        let mut last = None;
        for rate in [1000, 500, 200, 100, 50, 20] {
            self.traffic(rate, 5);
            let seen = self.host.seen().remove(0);
            let gap_ms = seen["longest_gap_ms"].as_f64().unwrap();
            println!(
                "without a switch: {rate} packets a second, {} lost, {gap_ms:.0} ms without an answer",
                seen["lost"]
            );
            last = Some(Calm { rate, gap_ms });
            if seen["lost"] == 0 && gap_ms < GAP_MS {
                break;
            }
        }
        last.unwrap()
    }

    /// The VF comes and goes under traffic: lost packets of each hole, and times without an answer of 50 ms and more.
    fn to_and_fro(&self, rate: u32) -> (Vec<u64>, Vec<f64>) {
        let host = &self.host;
        host.wait("no VF", |l| l.nics.iter().all(|n| n.vf.is_none()));
        let before = host.lanes().unwrap().counts;
        self.traffic(rate, 12 * TURNS as u64 + 10);
        std::thread::sleep(Duration::from_secs(4));
        let has = |l: &viola_proto::lanes::Lanes| l.nics.iter().any(|n| n.vf.is_some());
        for _ in 0..TURNS {
            host.sh("viola set l2 --lane pin");
            host.wait("a VF", has);
            std::thread::sleep(Duration::from_secs(4));
            host.sh("viola set l2 --lane never");
            host.wait("no VF", |l| !has(l));
            std::thread::sleep(Duration::from_secs(3));
        }
        let seen = host.seen();
        let lanes = host.lanes().unwrap();
        println!(
            "{}",
            host.sh("grep -E 'VF [0-9]|lane ' /tmp/viola.log; tail -n 12 /tmp/l2.log")
        );
        let guest: &Value = &seen[0];
        println!("{:?}", lanes.counts);
        let revoked = lanes.counts.revoked - before.revoked;
        assert_eq!(revoked, TURNS as u64, "{}", host.log());
        assert_eq!(
            (lanes.counts.failed, lanes.counts.kept),
            (0, 0),
            "{}",
            host.log()
        );
        // The NIC does not tell what went through the VF; its interrupts do.
        assert!(lanes.nics[0].vf_packets > 100, "{:?}", lanes.nics);
        let list = |key: &str| guest[key].as_array().unwrap().clone();
        let lost: Vec<u64> = list("holes").iter().filter_map(|h| h[1].as_u64()).collect();
        let gaps: Vec<f64> = list("gaps").iter().filter_map(|g| g[1].as_f64()).collect();
        println!(
            "{TURNS} times to and fro, {rate} packets a second: holes of {lost:?} packets, gaps of {gaps:.0?} ms"
        );
        (lost, gaps)
    }
}

/// Seconds that the guest's kernel takes to let its first VF go by itself.
fn control(host: &Host) -> f64 {
    host.sh("viola set l2 --lane pin");
    host.wait("a first VF", |l| l.nics.iter().any(|n| n.vf.is_some()));
    let begin = Instant::now();
    loop {
        let said = host.sh("grep CONTROL /tmp/l2.log");
        let mut words = said.split_whitespace().skip(1);
        let mut time = || words.find_map(|w| w.parse::<f64>().ok());
        if let (Some(from), Some(to)) = (time(), time()) {
            // and until it is bound again
            std::thread::sleep(Duration::from_secs(5));
            return to - from;
        }
        assert!(begin.elapsed() < Duration::from_secs(120), "{}", host.log());
        std::thread::sleep(Duration::from_secs(1));
    }
}
