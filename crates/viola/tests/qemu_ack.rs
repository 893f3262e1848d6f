// SPDX-License-Identifier: Apache-2.0
//! The guest module for early acknowledgements (`guest-kmod/`) in a QEMU VM: data that it has acknowledged is never lost, under
//! packet loss, reordering, small windows, memory pressure and closes. The VM is emulated: part of `make test-beds`.
//!
//! Sender and receiver run in one guest, in two network namespaces. The sender's vCPU receives the packets as a turbo vCPU
//! does. The receiver shares the other vCPU with a busy program, so that it is preempted while it owns the socket.
#![allow(clippy::unwrap_used)]

use std::path::{Path, PathBuf};
use std::time::Duration;

use serde_json::Value;
use viola_lab::qemu::{Image, Program, QemuVm, VmSpec};
use viola_lab::testing::lab_program;

const SCRIPT_TIMEOUT: Duration = Duration::from_secs(180);
const PARAMETERS: &str = "/sys/module/viola_ack/parameters";
/// Runs a command in the sender's namespace.
const THERE: &str = "ip netns exec there";
/// The guest's busybox shell would use its own applets.
const TOOLS: &str = "ip() { /usr/bin/ip \"$@\"; }; tc() { /usr/sbin/tc \"$@\"; };";

struct Vm {
    machine: QemuVm,
    viola: String,
    _folder: tempfile::TempDir,
}

impl Vm {
    fn boot() -> Self {
        let folder = tempfile::tempdir().unwrap();
        let here = Path::new(env!("CARGO_MANIFEST_DIR"));
        let image = Image::find_from([here], "new").unwrap_or_else(|e| panic!("{e}"));
        let module = image.beside("kmod/viola_ack.ko");
        let size = std::fs::metadata(&module)
            .unwrap_or_else(|e| panic!("{}: {e}; run scripts/guest-kmod.sh", module.display()))
            .len();
        let viola = Path::new(env!("CARGO_BIN_EXE_viola"));
        let program =
            Program::pack(&lab_program(viola), folder.path()).unwrap_or_else(|e| panic!("{e}"));
        let spec = program
            .disk(VmSpec::new("ack").cpus(2).cores(&[]).memory(768))
            .word("-drive")
            .word(format!(
                "if=none,id=module,file={},format=raw,read-only=on",
                module.display()
            ))
            .arg("-device virtio-blk-pci,drive=module");
        let machine = QemuVm::start(&spec, &image, folder.path()).unwrap_or_else(|e| panic!("{e}"));
        program.unpack(&machine).unwrap();
        let vm = Self {
            machine,
            viola: format!("env {} internal backlog", program.command()),
            _folder: folder,
        };
        vm.sh(&format!(
            "head -c {size} /dev/vdb >/tmp/viola_ack.ko; insmod /tmp/viola_ack.ko; modprobe veth; modprobe sch_netem; \
             ip link set lo up; mkdir -p /var/run; ip netns add there; ip link add here type veth peer name there netns there; \
             ip address add 10.9.0.1/24 dev here; ip link set here up; \
             {THERE} /usr/bin/ip address add 10.9.0.2/24 dev there; {THERE} /usr/bin/ip link set there up; \
             sysctl -q -w 'net.ipv4.tcp_rmem=4096 131072 16000000'; \
             taskset 2 {} spin </dev/null >/dev/null 2>&1 &",
            vm.viola
        ));
        vm
    }

    fn sh(&self, script: &str) -> String {
        let script = format!("set -e; {TOOLS} {script}");
        let output = self.machine.exec(&script, SCRIPT_TIMEOUT).unwrap();
        assert!(
            output.status == 0 && !output.timed_out,
            "{script}: {output:?}\n{}",
            self.machine.console()
        );
        output.stdout
    }

    fn ports(&self, ports: &str) {
        self.sh(&format!("echo '{ports}' >{PARAMETERS}/ports"));
        let shown = self.sh(&format!("cat {PARAMETERS}/ports"));
        assert_eq!(shown.trim(), ports);
    }

    fn count(&self, name: &str) -> u64 {
        let counts = self.sh(&format!("cat {PARAMETERS}/counts"));
        let line = counts
            .lines()
            .find_map(|line| line.strip_prefix(name)?.strip_prefix(' '));
        line.unwrap_or_else(|| panic!("no {name}: {counts}"))
            .parse()
            .unwrap()
    }

    /// Runs one stream and returns the reports of sender and receiver. `receiver` is SIZE RCVBUF PAUSE_US STOP; `netem` is
    /// applied to the sender's packets.
    fn stream(&self, receiver: &str, netem: &str, seconds: u32) -> (Value, Value) {
        let mut words = receiver.split(' ');
        let size = words.next().unwrap();
        let rest: Vec<&str> = words.collect();
        let qdisc = match netem {
            "" => String::new(),
            netem => {
                format!("{THERE} /usr/sbin/tc qdisc add dev there root netem {netem} limit 20000; ")
            }
        };
        let viola = &self.viola;
        let text = self.sh(&format!(
            "{qdisc}taskset 2 {viola} recv 5001 {size} {} </dev/null >/tmp/received & r=$!; \
             while ! grep -q ':1389 00000000:0000 0A' /proc/net/tcp; do usleep 50000; done; \
             taskset 1 /usr/bin/{THERE} {viola} send 10.9.0.1 5001 {seconds}; wait $r; cat /tmp/received; \
             {THERE} /usr/sbin/tc qdisc del dev there root 2>/dev/null || true",
            rest.join(" ")
        ));
        let mut lines = text.lines().map(|line| {
            serde_json::from_str::<Value>(line).unwrap_or_else(|e| panic!("{e}: {text}"))
        });
        let (sent, received) = (lines.next().unwrap(), lines.next().unwrap());
        println!("{receiver} {netem}: {sent} {received}");
        (sent, received)
    }

    /// Asserts that a stream arrives whole. Returns the number of early acknowledgements.
    fn arrives(&self, receiver: &str, netem: &str) -> u64 {
        let before = self.count("sent");
        self.whole(receiver, netem);
        self.count("sent") - before
    }

    fn whole(&self, receiver: &str, netem: &str) {
        let (sent, received) = self.stream(receiver, netem, 4);
        assert_eq!(received["right"], true, "{received}");
        assert_eq!(received["ended"], "end", "{received}");
        assert_eq!(sent["ended"], "end", "{sent}");
        assert_eq!(received["bytes"], sent["bytes"], "{sent} {received}");
        assert!(sent["bytes"].as_u64().unwrap() > 100_000, "{sent}");
    }
}

#[test]
#[ignore = "boots an emulated PC: make test-beds"]
fn data_that_is_acknowledged_early_is_never_lost() {
    let vm = Vm::boot();
    // The module does nothing before it is configured.
    assert_eq!(vm.arrives("262144 0 0 0", ""), 0);
    let refused = vm.machine.exec(
        &format!("echo 99999 >{PARAMETERS}/ports"),
        Duration::from_secs(20),
    );
    assert_ne!(refused.unwrap().status, 0);
    vm.ports("80,5001-5002");

    let early = vm.arrives("262144 0 0 0", "");
    assert!(early > 50, "{early}");
    assert!(vm.arrives("4096 0 0 0", "") > 0);
    // A new connection often reuses the memory of an old one.
    for _ in 0..4 {
        let early = vm.arrives("262144 0 0 0", "");
        assert!(early > 50, "{early}");
    }
    // Network faults: each leaves a gap, behind which the module acknowledges nothing early.
    assert!(vm.arrives("262144 0 0 0", "delay 3ms") > 10);
    // Behind a gap the receiver has nothing to read, so it seldom owns its socket.
    let (gaps, mut streams) = (vm.count("gap"), 0);
    while vm.count("gap") == gaps {
        assert!(streams < 8, "no segment behind a gap reached the backlog");
        assert!(vm.arrives("262144 0 0 0", "delay 2ms loss 1%") > 0);
        streams += 1;
    }
    vm.arrives("262144 0 0 0", "delay 3ms reorder 75% 50%");
    vm.arrives("262144 0 0 0", "delay 2ms duplicate 5%");
    // Retransmissions overtake older segments: timestamps go back and forth.
    vm.arrives("262144 0 0 0", "delay 4ms 3ms loss 1% duplicate 2%");
    // A sender without timestamps, and one that would take the kernel's later acknowledgements for a loss.
    vm.sh(&format!("{THERE} sysctl -q -w net.ipv4.tcp_timestamps=0"));
    assert!(vm.arrives("262144 0 0 0", "delay 1ms loss 1%") > 0);
    vm.sh(&format!(
        "{THERE} sysctl -q -w net.ipv4.tcp_timestamps=1 net.ipv4.tcp_sack=0"
    ));
    assert_eq!(vm.arrives("262144 0 0 0", "delay 1ms"), 0);
    vm.sh(&format!("{THERE} sysctl -q -w net.ipv4.tcp_sack=1"));
    // A window of a few segments, which the receiver seldom opens.
    vm.arrives("2048 4096 500 0", "");
    vm.arrives("16384 32768 200 0", "delay 1ms loss 1%");

    // Above TCP's low memory threshold the module acknowledges nothing early.
    let (memory, short) = (vm.sh("cat /proc/sys/net/ipv4/tcp_mem"), vm.count("memory"));
    vm.sh("echo 1 100000 200000 >/proc/sys/net/ipv4/tcp_mem");
    let early = vm.arrives("262144 0 0 0", "");
    assert!(vm.count("memory") > short + 20, "{early}");
    vm.sh(&format!("echo {memory} >/proc/sys/net/ipv4/tcp_mem"));

    // The receiver closes with data unread and in the backlog. The sender sees a reset, as with the stock kernel.
    for _ in 0..3 {
        let (sent, received) = vm.stream("65536 0 0 3000000", "", 20);
        assert_eq!(
            (&received["right"], &received["ended"]),
            (&true.into(), &"stopped".into())
        );
        let ended = sent["ended"].as_str().unwrap();
        assert!(ended.contains("reset") || ended.contains("pipe"), "{sent}");
        assert!(sent["seconds"].as_f64().unwrap() < 19.0, "{sent}");
    }
    assert_eq!(vm.count("reset"), 0);

    // Memory runs out while acknowledged segments wait. The stream arrives whole, or both ends see a reset soon.
    vm.sh(&format!(
        "touch /tmp/short; (while [ -e /tmp/short ]; do echo 1 2 3 >/proc/sys/net/ipv4/tcp_mem; usleep 20000; \
         echo {memory} >/proc/sys/net/ipv4/tcp_mem; usleep 60000; done) </dev/null >/dev/null 2>&1 &",
        memory = memory.trim()
    ));
    let (mut broken, mut streams) = (0, 0);
    while streams < 3 || broken == 0 && streams < 12 {
        streams += 1;
        let (sent, received) = vm.stream("262144 0 0 0", "", 3);
        assert_eq!(received["right"], true, "{received}");
        assert!(received["seconds"].as_f64().unwrap() < 30.0, "{received}");
        if received["ended"] == "end" {
            assert_eq!(received["bytes"], sent["bytes"], "{sent} {received}");
        } else {
            broken += 1;
            let ended = sent["ended"].as_str().unwrap();
            assert!(ended.contains("reset") || ended.contains("pipe"), "{sent}");
        }
    }
    vm.sh("rm /tmp/short; sleep 1");
    println!("{broken} of {streams} streams were reset");
    assert!(
        broken > 0,
        "no stream was reset, so the check after drops did not run"
    );
    assert_eq!(vm.count("reset"), broken);

    // The module is unloaded and loaded again while data arrives.
    vm.sh(
        "(for n in 1 2 3; do sleep 0.6; rmmod viola_ack; sleep 0.3; insmod /tmp/viola_ack.ko ports=5001; done; echo done) \
         </dev/null >/tmp/again 2>&1 &",
    );
    vm.whole("262144 0 0 0", "delay 1ms");
    let again = vm.sh("while ! grep -q done /tmp/again; do usleep 100000; done; cat /tmp/again");
    assert_eq!(again, "done\n");
    vm.ports("5001");
    vm.whole("262144 0 0 0", "");
    assert!(vm.count("sent") > 0);

    let words = vm.sh("dmesg | grep -E 'BUG|WARNING|Oops|Call Trace|stall' || true");
    assert_eq!(words, "");
}

/// The module's source and its DKMS package must have the same version.
#[test]
fn the_package_and_the_module_have_the_same_version() {
    let folder = PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("../../guest-kmod");
    let read = |name: &str| std::fs::read_to_string(folder.join(name)).unwrap();
    let version = concat!("\"", env!("CARGO_PKG_VERSION"), "\"");
    assert!(read("dkms.conf").contains(&format!("PACKAGE_VERSION={version}")));
    assert!(read("main.c").contains(&format!("MODULE_VERSION({version})")));
}
