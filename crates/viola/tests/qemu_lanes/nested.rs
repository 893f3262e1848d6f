// SPDX-License-Identifier: Apache-2.0
//! A nested QEMU VM with KVM. Its VF is passed through by vfio-pci, plugged and unplugged, and paired by net_failover or by a
//! bond of viola-agent.

use std::path::Path;
use std::process::Command;
use std::time::{Duration, Instant};

use serde_json::{Value, json};

use super::host::{Host, image};

/// Switches of each kind in a round.
const TURNS: usize = 4;
/// How long after viola's part a switch may still affect traffic, in seconds: the guest's kernel probes its VF.
const PROBE_S: f64 = 3.0;
/// Rate of the fast stream in packets per second.
const RATE: u32 = 1000;
/// Timeout of a guest's boot by this machine's clock.
const BOOT_TIMEOUT: Duration = Duration::from_secs(600);

/// QEMU arguments of a host with an IOMMU and KVM, both emulated.
const IOMMU: &str =
    "-machine kernel-irqchip=split -device intel-iommu,intremap=on,caching-mode=on,device-iotlb=on";

/// The guest's init: it gives its pair an address and runs a traffic server.
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
/viola/bin/viola-lab internal traffic serve
echo L2 ENDED; sleep 1000
";

/// Pairs the NICs by net_failover.
const FAILOVER: &str = r"
driver=/sys/bus/pci/drivers/igbvf
# what letting a VF go costs this guest's own kernel, with nobody else in it: once, with the first one
(until [ -e $driver/0000:* ]; do sleep 0.2; done; sleep 3
 for d in $driver/0000:*; do d=${d##*/}; a=$(now); echo $d >$driver/unbind; echo CONTROL $a to $(now); echo $d >$driver/bind; done) &
";

/// Pairs the NICs by viola-agent.
const AGENT: &str = r#"
for p in /sys/class/virtio-ports/*; do read -r name <$p/name && [ $name = org.viola.lane.0 ] && port=/dev/${p##*/}; done
printf '[lane]\nport = "%s"\n' $port >/run/agent.toml
viola-agent --config /run/agent.toml &
until [ -e /sys/class/net/viola0 ] && ip addr show viola0 | grep -q 10.9.0.2; do sleep 0.2; done
viola-agent --config /run/agent.toml status
"#;

/// The mechanism that pairs a guest's two NICs.
#[derive(Clone, Copy, PartialEq)]
enum Pair {
    Failover,
    Agent,
}

/// Packs QEMU and its libraries. They must be found at the paths where they were built.
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

/// The root folder in the path of the program's loader.
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
fn a_nested_guests_vf_switches_under_its_agents_bond_without_delay() {
    let bed = Bed::boot("lanes-agent", Pair::Agent);
    assert_no_delay(&bed.rounds());
}

#[test]
#[ignore = "boots an emulated PC: make test-beds"]
fn a_nested_guests_vf_switches_by_net_failover_and_its_connections_survive() {
    let bed = Bed::boot("lanes-kvm", Pair::Failover);
    let control = control(&bed.host);
    bed.host.sh("viola set l2 --lane never");
    bed.host
        .wait("no VF", |l| l.nics.iter().all(|n| n.vf.is_none()));
    let switches = bed.rounds();
    // QEMU's unplug makes the guest fail over by itself: packets that arrive while its kernel unbinds the VF are lost.
    println!("the guest's kernel alone takes {control:.2} s to let a VF go");
    assert_no_delay(&switches);
}

/// Longest permitted gap of a switch, ms.
const MAX_GAP_MS: f64 = 100.0;

/// The traffic during a switch, or between it and the next one.
#[derive(Debug)]
#[allow(dead_code, reason = "shown")]
struct SwitchEffect {
    given: bool,
    /// Begin in seconds after the start of the traffic, and duration until viola was done.
    at: f64,
    took: f64,
    /// Pings without an answer, of one each 50 ms.
    pings: u64,
    /// Packets of the fast stream without an answer.
    lost: u64,
    /// Longest time without an answer in the fast stream, ms.
    gap_ms: f64,
}

/// Asserts that a switch loses no ping at the median and one at most, and that the stream has no long gap.
fn assert_no_delay(switches: &[SwitchEffect]) {
    let mut pings: Vec<u64> = switches.iter().map(|s| s.pings).collect();
    pings.sort_unstable();
    assert_eq!(pings[pings.len() / 2], 0, "{switches:?}");
    assert!(pings[pings.len() - 1] <= 1, "{switches:?}");
    assert!(
        switches.iter().all(|s| s.gap_ms <= MAX_GAP_MS),
        "{switches:?}"
    );
}

struct Bed {
    host: Host,
}

impl Bed {
    fn boot(name: &str, pair: Pair) -> Self {
        let host = Host::boot_with(name, 0, |mut spec, folder| {
            spec.kernel_args
                .extend(["intel_iommu=on", "hugepages=272"].map(String::from));
            let archive = pack(folder);
            // It counts instructions, so it may share core 0 with the system (scripts/test-beds.sh).
            spec.memory(3072)
                .cores(&[0])
                .disk("qemu", &archive, "raw")
                .arg(IOMMU)
                .icount(0)
        });
        let loader = root_of_loader();
        let init = INIT.replace("PAIR", if pair == Pair::Agent { AGENT } else { FAILOVER });
        let said = host.sh(&format!(
            "set -e; tar -x -f /dev/vdb -C /; mkdir -p $(dirname {loader}); ln -sfn /q/root {loader}; \
             for m in kvm_amd vfio_pci vfio_iommu_type1 tun vhost_net; do modprobe $m; done; \
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
        // The guest gets no VF before the test asks for one: during the boot a VF would be one more NIC.
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
             -machine q35,memory-backend=m -object memory-backend-memfd,id=m,size=512M,hugetlb=on,prealloc=on -accel kvm -cpu host \
             -smp 1 -m 512 -nographic -nodefaults -no-reboot -serial file:/tmp/l2.log -monitor none \
             -qmp unix:/tmp/l2.a,server=on,wait=off -qmp unix:/tmp/l2.b,server=on,wait=off -qmp unix:/tmp/l2.c,server=on,wait=off \
             -device pcie-root-port,id=r1,chassis=1,slot=1 -device pcie-root-port,id=r2,chassis=2,slot=2 \
             -netdev tap,id=t0,ifname=tap0,script=no,downscript=no,vhost=on {port} \
             -device virtio-net-pci,netdev=t0,id=net1,bus=r1,mac=52:54:00:00:09:02{failover} \
             -kernel /q/vmlinuz -initrd /q/initrd2 \
             -append 'console=ttyS0 rdinit=/init2 mitigations=off net.ifnames=0 quiet loglevel=6 tsc=reliable no_timer_check' </dev/null >/tmp/l2.out 2>&1 & \
             n=0; until /viola/bin/viola register $!; do n=$((n + 1)); [ $n -gt 100 ] && exit 1; sleep 0.2; done"
        ));
        let begin = Instant::now();
        loop {
            let said = host.sh("cat /tmp/l2.log /tmp/l2.out");
            if said.contains("L2 READY") {
                break;
            }
            assert!(begin.elapsed() < BOOT_TIMEOUT, "{said}\n{}", host.log());
            std::thread::sleep(Duration::from_secs(1));
        }
        println!(
            "the nested guest is up after {:.0} s",
            begin.elapsed().as_secs_f32()
        );
        host.wait("the daemon sees the guest", |l| {
            l.nics.iter().any(|n| n.name == "l2")
        });
        // The guest starts the traffic server slowly, because the program is large.
        let one = json!({
            "address": "10.9.0.2", "phase_ms": 100, "guests": [{"netns": "peer", "rates": [10]}],
        });
        let said = host.sh(&format!(
            "for i in $(seq 60); do /viola/bin/viola-lab internal traffic '{one}' && break; sleep 1; done 2>&1"
        ));
        assert!(said.contains("stream_whole\":true"), "{said}");
        Self { host }
    }

    /// Runs a fast stream and pings each 50 ms to the guest while a script runs, which may write [`STEPS`]. Returns both
    /// reports.
    fn traffic(&self, beside: &str) -> Vec<Value> {
        let spec = json!({
            "address": "10.9.0.2", "phase_ms": 3_600_000, "until": "/tmp/enough",
            "guests": [{"netns": "peer", "rates": [RATE], "pieces": 10}, {"netns": "peer", "rates": [20], "pieces": 1}],
        });
        // One script on the host does all: further requests would take its CPU time.
        self.host.sh(&format!(
            "rm -f /tmp/seen /tmp/enough {STEPS}; (/viola/bin/viola-lab internal traffic '{spec}' >/tmp/traffic 2>&1; mv /tmp/traffic /tmp/seen) </dev/null >/dev/null 2>&1 &
             now() {{ read up rest </proc/uptime; echo $up; }}; begin=$(now)
             {beside}
             touch /tmp/enough
             while ! [ -e /tmp/seen ]; do sleep 0.5; done"
        ));
        self.host.seen()
    }

    /// Two rounds, or `VIOLA_ROUNDS`. With net_failover every second revocation loses a ping, so one round may lose a ping in
    /// each of them by chance.
    fn rounds(&self) -> Vec<SwitchEffect> {
        let said = std::env::var("VIOLA_ROUNDS").ok();
        let rounds: usize = said.map_or(2, |rounds| rounds.parse().unwrap());
        (0..rounds).flat_map(|_| self.one_round()).collect()
    }

    /// Plugs and unplugs the VF under traffic and returns the effect of each switch. Asserts that nothing is lost or late
    /// between switches.
    fn one_round(&self) -> Vec<SwitchEffect> {
        let host = &self.host;
        host.wait("no VF", |l| l.nics.iter().all(|n| n.vf.is_none()));
        let before = host.lanes().unwrap().counts;
        let steer = format!(
            "sleep 3
             step() {{
                 n=$(grep -c \"$3\" /tmp/viola.log); a=$(now); viola set l2 --lane $2 >/dev/null
                 for i in $(seq 300); do [ $(grep -c \"$3\" /tmp/viola.log) -gt $n ] && break; sleep 0.1; done
                 echo $1 $begin $a $(now) >>{STEPS}; sleep 5
             }}
             for turn in $(seq {TURNS}); do step given pin ' granted in'; step taken never ' taken back in'; done"
        );
        let guests = self.traffic(&steer);
        let lanes = host.lanes().unwrap();
        println!(
            "{}",
            host.sh("grep -E 'VF [0-9]|lane ' /tmp/viola.log; tail -n 12 /tmp/l2.log")
        );
        println!("{:?}", lanes.counts);
        let revoked = lanes.counts.revoked - before.revoked;
        assert_eq!(revoked, TURNS as u64, "{}", host.log());
        assert_eq!(
            (lanes.counts.failed, lanes.counts.kept),
            (0, 0),
            "{}",
            host.log()
        );
        // The NIC has no counter for a VF's packets; the VF's interrupts prove that it was used.
        assert!(lanes.nics[0].vf_packets > 100, "{:?}", lanes.nics);
        let steps = host.sh(&format!("cat {STEPS}"));
        let seen = switch_effects(&steps, &guests);
        let (switches, calm): (Vec<SwitchEffect>, Vec<SwitchEffect>) = seen.into_iter().unzip();
        for switch in &switches {
            println!("{switch:?}");
        }
        assert_eq!(switches.len(), 2 * TURNS, "{steps}");
        let sent = guests[0]["sent"].as_u64().unwrap() as f64;
        let took = calm.last().map_or(0.0, |c| c.at + c.took);
        let sum = |of: fn(&SwitchEffect) -> u64| switches.iter().map(of).sum::<u64>();
        println!(
            "{} switches: {} of {} pings lost, {} of {sent} packets in {took:.0} s, longest gap {:.1} ms",
            switches.len(),
            sum(|s| s.pings),
            guests[1]["sent"],
            sum(|s| s.lost),
            guests[0]["longest_gap_ms"].as_f64().unwrap()
        );
        assert!(sent > 0.95 * took * f64::from(RATE), "{sent} in {took} s");
        assert!(
            calm.iter().all(|c| c.lost == 0 && c.gap_ms == 0.0),
            "{calm:?}"
        );
        switches
    }
}

/// The file in which the host records the times of the switches.
const STEPS: &str = "/tmp/steps";

/// Takes lines of [`STEPS`] (kind, start of the traffic, start of the switch, its end: s of uptime) and the reports of both
/// streams. Returns the effects on the traffic during each switch and between it and the next.
fn switch_effects(steps: &str, guests: &[Value]) -> Vec<(SwitchEffect, SwitchEffect)> {
    let (fast, pings) = (&guests[0], &guests[1]);
    let pairs = |of: &Value, key: &str| -> Vec<(f64, f64)> {
        let list = of[key].as_array().unwrap().iter();
        list.map(|p| (p[0].as_f64().unwrap() / 1000.0, p[1].as_f64().unwrap()))
            .collect()
    };
    let (gaps, holes) = (pairs(fast, "gaps"), pairs(fast, "holes"));
    let missed = pairs(pings, "holes");
    let times: Vec<(bool, f64, f64)> = steps
        .lines()
        .map(|line| {
            let words: Vec<&str> = line.split_whitespace().collect();
            let at = |k: usize| words[k].parse::<f64>().unwrap();
            // A stream begins a moment after its program starts.
            (words[0] == "given", at(2) - at(1) - 0.3, at(3) - at(1))
        })
        .collect();
    let between = |given: bool, from: f64, done: f64, to: f64| {
        let in_it = |list: &[(f64, f64)]| -> Vec<f64> {
            let is = |(at, _): &&(f64, f64)| (from..to).contains(at);
            list.iter().filter(is).map(|(_, n)| *n).collect()
        };
        SwitchEffect {
            given,
            at: from,
            took: done - from,
            pings: in_it(&missed).iter().sum::<f64>() as u64,
            lost: in_it(&holes).iter().sum::<f64>() as u64,
            gap_ms: in_it(&gaps).into_iter().fold(0.0, f64::max),
        }
    };
    let mut seen = Vec::new();
    for (k, &(given, from, done)) in times.iter().enumerate() {
        let to = done + PROBE_S;
        let next = times.get(k + 1).map_or(to + PROBE_S, |(_, next, _)| *next);
        seen.push((
            between(given, from, done, to),
            between(given, to, next, next),
        ));
    }
    seen
}

/// Seconds that the guest's kernel alone takes to unbind its first VF.
fn control(host: &Host) -> f64 {
    host.sh("viola set l2 --lane pin");
    host.wait("a first VF", |l| l.nics.iter().any(|n| n.vf.is_some()));
    let begin = Instant::now();
    loop {
        let said = host.sh("grep CONTROL /tmp/l2.log");
        let mut words = said.split_whitespace().skip(1);
        let mut time = || words.find_map(|w| w.parse::<f64>().ok());
        if let (Some(from), Some(to)) = (time(), time()) {
            // Waits until the VF is bound again.
            std::thread::sleep(Duration::from_secs(5));
            return to - from;
        }
        assert!(begin.elapsed() < Duration::from_secs(120), "{}", host.log());
        std::thread::sleep(Duration::from_secs(1));
    }
}
