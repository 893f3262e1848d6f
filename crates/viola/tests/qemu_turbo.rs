// SPDX-License-Identifier: Apache-2.0
//! The agent's part of a turbo core in a QEMU VM: a PC's interrupts, virtio-net with several queues, cgroups, and hotplug of
//! vCPUs and interfaces. The VM is emulated: part of `make test-beds`.
#![allow(clippy::unwrap_used)]

use std::path::Path;
use std::process::Command;
use std::time::{Duration, Instant};

use rustix::thread::{UnshareFlags, unshare_unsafe};
use serde_json::{Value, json};
use viola_lab::qemu::{Image, QemuVm, VmSpec};

/// Timeout of a change in an emulated VM; the agent itself checks every ten seconds.
const CHANGE_TIMEOUT: Duration = Duration::from_secs(90);
const CONFIG: &str = "/tmp/turbo.toml";

struct Vm {
    machine: QemuVm,
    _folder: tempfile::TempDir,
}

impl Vm {
    /// Boots a VM with this number of vCPUs, virtio-net with two queues, and a disk.
    fn boot(vcpus: u32) -> Self {
        Self::boot_with(vcpus, "")
    }

    fn boot_with(vcpus: u32, more: &str) -> Self {
        let folder = tempfile::tempdir().unwrap();
        network();
        let disk = folder.path().join("d.img");
        std::fs::File::create(&disk)
            .unwrap()
            .set_len(32 << 20)
            .unwrap();
        let made = Command::new("mkfs.ext4")
            .args(["-q", "-F"])
            .arg(&disk)
            .status();
        assert!(made.unwrap().success());
        let here = Path::new(env!("CARGO_MANIFEST_DIR"));
        let image = Image::find_from([here], "new").unwrap_or_else(|e| panic!("{e}"));
        let spec = VmSpec::new("turbo")
            .cpus(vcpus)
            .cores(&[])
            .arg(&format!("-smp {vcpus},maxcpus=3"))
            .arg(more)
            .memory(512)
            .disk("d0", &disk, "raw")
            .arg(
                "-netdev tap,id=n0,ifname=tap0,script=no,downscript=no,queues=2 \
                 -device virtio-net-pci,netdev=n0,mac=52:54:00:77:00:11,mq=on,vectors=6",
            );
        let machine = QemuVm::start(&spec, &image, folder.path()).unwrap_or_else(|e| panic!("{e}"));
        let vm = Self {
            machine,
            _folder: folder,
        };
        vm.sh(
            "modprobe virtio_net; ip link set lo up; ip address add 10.77.0.11/24 dev eth0; ip link set eth0 up; \
             mkdir -p /run/viola; mountpoint -q /sys/fs/cgroup || mount -t cgroup2 cgroup2 /sys/fs/cgroup; \
             ping -c 1 -w 20 10.77.0.1 >/dev/null",
        );
        vm
    }

    fn sh(&self, script: &str) -> String {
        let text = self.machine.sh(script).unwrap_or_else(|e| {
            let log = self.machine.sh("cat /tmp/agent.log").unwrap_or_default();
            panic!("{e}\nthe agent says: {log}")
        });
        text.trim().to_owned()
    }

    fn start_agent(&self, cpu: u32) {
        self.sh(&format!(
            "printf '[turbo]\\ncpu = {cpu}\\nbandwidth_mbit = 1000\\n' >{CONFIG}; \
             viola-agent --config {CONFIG} </dev/null >/tmp/agent.log 2>&1 & echo $! >/tmp/agent.pid"
        ));
        self.wait("the agent answers", || {
            self.machine.sh(&status("status --json")).is_ok()
        });
    }

    /// Ends the agent by a signal and waits until it is gone.
    fn end_agent(&self, signal: &str) {
        self.sh(&format!(
            "kill -{signal} $(cat /tmp/agent.pid); while [ -e /proc/$(cat /tmp/agent.pid)/exe ]; do usleep 50000; done"
        ));
    }

    fn report(&self) -> Value {
        let text = self.sh(&status("status --json"));
        let all: Value = serde_json::from_str(&text).unwrap_or_else(|e| panic!("{e}: {text}"));
        all["turbo"].clone()
    }

    fn wait_state(&self, wanted: &str) {
        self.wait(wanted, || self.report()["state"] == wanted);
    }

    fn wait(&self, what: &str, done: impl Fn() -> bool) {
        let begin = Instant::now();
        while !done() {
            let log = || {
                let show = status("status");
                self.machine
                    .sh(&format!("cat /tmp/agent.log; {show}"))
                    .unwrap_or_default()
            };
            assert!(begin.elapsed() < CHANGE_TIMEOUT, "not: {what}\n{}", log());
            std::thread::sleep(Duration::from_millis(300));
        }
    }

    /// The agent's report on settings of a part that it could not make.
    fn left(&self, part: &str) -> String {
        let report = self.report();
        let of = |left: &&Value| left["part"] == part;
        let all = report["left"].as_array().unwrap().iter().filter(of);
        all.map(|left| left["why"].as_str().unwrap().to_owned())
            .collect::<Vec<_>>()
            .join("; ")
    }

    /// All settings that the agent may change.
    fn settings(&self) -> String {
        self.sh(
            "for f in /proc/irq/[0-9]*/smp_affinity_list /sys/class/net/eth*/queues/*/*ps_cpus /sys/class/net/eth*/queues/*/rps_flow_cnt \
             /sys/block/vd*/queue/rq_affinity /sys/devices/virtual/workqueue/cpumask /proc/sys/net/core/rmem_* /proc/sys/net/ipv4/tcp_rmem \
             /sys/fs/cgroup/cgroup.subtree_control /sys/fs/cgroup/*/cpuset.cpus; do [ ! -e $f ] || echo $f $(cat $f); done; \
             grep Cpus_allowed_list /proc/1/status /proc/self/status | cut -d: -f 3; ls -d /sys/fs/cgroup/viola* 2>/dev/null || true",
        )
    }

    /// Target CPUs of an interface's queue interrupts. The kernel moves each interrupt when it next arrives.
    fn queues(&self, nic: &str) -> Vec<String> {
        let text = self.sh(&format!(
            "d=$(basename $(readlink -f /sys/class/net/{nic}/device)); \
             for n in $(sed -n \"s/^ *\\([0-9]*\\):.* $d-.*put.*/\\1/p\" /proc/interrupts); do cat /proc/irq/$n/smp_affinity_list; done"
        ));
        text.lines().map(str::to_owned).collect()
    }

    /// Permitted CPUs of each kernel thread whose name begins with `name`.
    fn threads(&self, name: &str) -> Vec<String> {
        let text = self.sh(&format!(
            "for d in /proc/[0-9]*; do read -r n <$d/comm || continue; case $n in {name}*) \
             sed -n 's/Cpus_allowed_list:.//p' $d/status;; esac; done 2>/dev/null"
        ));
        text.lines().map(str::to_owned).collect()
    }

    /// Interrupts of eth0 so far on each of the first two vCPUs.
    fn interrupts(&self) -> [u64; 2] {
        let text = self.sh("d=$(basename $(readlink -f /sys/class/net/eth0/device)); \
             awk \"/$d-.*put/{a+=\\$2;b+=\\$3}END{print a+0,b+0}\" /proc/interrupts");
        let mut numbers = text.split(' ').map(|n| n.parse().unwrap());
        [numbers.next().unwrap(), numbers.next().unwrap()]
    }

    /// Interrupts of eth0 on each vCPU while packets are exchanged.
    fn traffic(&self) -> [u64; 2] {
        let before = self.interrupts();
        self.sh("ping -q -c 40 -i 0.02 -w 20 10.77.0.1 >/dev/null");
        let after = self.interrupts();
        [after[0] - before[0], after[1] - before[1]]
    }
}

fn status(words: &str) -> String {
    format!("viola-agent --config {CONFIG} {words} 2>&1")
}

/// Moves the calling thread into a new network namespace that has a tap with two queues.
fn network() {
    // SAFETY: only this thread changes its network namespace; file descriptors stay shared.
    unsafe { unshare_unsafe(UnshareFlags::NEWNET) }.unwrap();
    for words in [
        "link set lo up",
        "tuntap add dev tap0 mode tap multi_queue",
        "address add 10.77.0.1/24 dev tap0",
        "link set tap0 up",
    ] {
        let done = Command::new("ip").args(words.split(' ')).output().unwrap();
        assert!(done.status.success(), "ip {words}: {done:?}");
    }
}

#[test]
#[ignore = "boots an emulated PC: make test-beds"]
fn io_moves_to_the_turbo_vcpu_applications_leave_it_and_all_is_restored() {
    let vm = Vm::boot(2);
    vm.sh("for n in $(sed -n 's/^ *\\([0-9]*\\):.*virtio.*put.*/\\1/p' /proc/interrupts); do echo 1 >/proc/irq/$n/smp_affinity_list; done");
    let before = vm.settings();
    let [_, other] = vm.traffic();
    assert!(other > 20, "too few interrupts reach vCPU 1: {other}");
    vm.start_agent(0);
    vm.wait_state("in force");
    let queues = vm.queues("eth0");
    assert!(
        queues.len() >= 4 && queues.iter().all(|q| q == "0"),
        "{queues:?}"
    );
    // Each interrupt arrives once more at the old CPU before the kernel moves it.
    vm.wait("interrupts reach only the turbo vCPU", || {
        let [turbo, other] = vm.traffic();
        turbo > 20 && other == 0
    });
    // The disk has a queue for each vCPU; the kernel manages its interrupts and does not let them move.
    let left = vm.left("interrupts");
    assert!(
        left.contains("-req.") && left.contains("the kernel does not let its affinity be set"),
        "{left}"
    );
    // Unbound work queues and socket buffers.
    assert_eq!(vm.sh("cat /sys/devices/virtual/workqueue/cpumask"), "1");
    let rmem: u64 = vm
        .sh("cut -f 3 /proc/sys/net/ipv4/tcp_rmem")
        .parse()
        .unwrap();
    assert!(rmem >= 45_000_000, "{rmem}");
    // Applications leave the turbo vCPU, also one that sets its affinity to it.
    let report = vm.report();
    assert_eq!(report["applications"], "partition", "{report}");
    let cpus = vm.sh(
        "sh -c 'while :; do :; done' </dev/null >/dev/null 2>&1 & taskset -p 3 $! >/dev/null 2>&1; sleep 1; \
         sed -n 's/Cpus_allowed_list:.//p' /proc/$!/status; cut -d' ' -f 39 /proc/$!/stat; kill $!",
    );
    assert_eq!(cpus, "1\n1");
    // NAPI threads that poll an interface.
    vm.sh("echo 1 >/sys/class/net/eth0/threaded");
    vm.wait("threads of NAPI are moved", || {
        let cpus = vm.threads("napi/eth0");
        !cpus.is_empty() && cpus.iter().all(|c| c == "0")
    });
    vm.sh("echo 0 >/sys/class/net/eth0/threaded");
    // The journal thread of a file system that is mounted later.
    vm.sh("mkdir -p /mnt/d; modprobe ext4; mount -t ext4 /dev/vda /mnt/d");
    vm.wait("the journal's thread is moved", || {
        vm.threads("jbd2/vda") == ["0"]
    });
    vm.sh("umount /mnt/d");
    // After a kill all settings stay until the agent's next start or `restore`.
    vm.end_agent("KILL");
    assert_ne!(vm.settings(), before);
    vm.sh(&status("restore"));
    assert_eq!(vm.settings(), before);
    vm.start_agent(0);
    vm.wait_state("in force");
    vm.end_agent("TERM");
    assert_eq!(vm.settings(), before);
}

#[test]
#[ignore = "boots an emulated PC: make test-beds"]
fn hotplug_of_vcpus_and_interfaces_is_followed() {
    // Without a known hypervisor the kernel accepts only vCPUs that were present at boot.
    let third = "max-x86_64-cpu,id=cpu2,socket-id=0,core-id=2,thread-id=0";
    let vm = Vm::boot_with(2, &format!("-device {third}"));
    vm.start_agent(0);
    vm.wait_state("in force");
    // Plugs an interface.
    let netdev = json!({"type": "user", "id": "h1"});
    vm.machine.qmp("netdev_add", Some(netdev)).unwrap();
    let device = json!({"driver": "virtio-net-pci", "id": "nic1", "netdev": "h1", "mac": "52:54:00:77:00:12", "bus": "rp1"});
    vm.machine.qmp("device_add", Some(device)).unwrap();
    vm.wait("eth1 exists", || {
        vm.machine.sh("ls /sys/class/net/eth1").is_ok()
    });
    vm.sh("ip link set eth1 up");
    vm.wait("interrupts of eth1 are moved", || {
        let queues = vm.queues("eth1");
        queues.len() >= 2 && queues.iter().all(|q| q == "0")
    });
    // Its interrupts are named after its device.
    let name = vm.sh("basename $(readlink /sys/class/net/eth1/device)");
    let name = format!("({}-", name.trim());
    vm.wait("eth1 is named", || vm.report().to_string().contains(&name));
    vm.machine.clear_events();
    let nic = json!({"id": "nic1"});
    vm.machine.qmp("device_del", Some(nic)).unwrap();
    vm.machine
        .wait_event(
            "DEVICE_DELETED",
            |data| data["device"] == "nic1",
            CHANGE_TIMEOUT,
        )
        .unwrap();
    vm.wait("eth1 is no longer in the report", || {
        !vm.report().to_string().contains(&name)
    });
    assert_eq!(vm.report()["state"], "in force");
    // Takes a vCPU offline.
    let xps = || vm.sh("cat /sys/class/net/eth0/queues/tx-1/xps_cpus");
    assert_eq!(xps(), "6");
    vm.sh("echo 0 >/sys/devices/system/cpu/cpu2/online");
    vm.wait("the offline vCPU is left out", || xps() == "2");
    vm.sh("echo 1 >/sys/devices/system/cpu/cpu2/online");
    vm.wait("programs may use the vCPU", || xps() == "6");
    // Unplugs a vCPU. QEMU sends no event for an emulated CPU, and it exits when that CPU is plugged in again.
    let cpu = json!({"id": "cpu2"});
    vm.machine.qmp("device_del", Some(cpu)).unwrap();
    vm.wait("the vCPU is unplugged", || {
        let cpus = vm.machine.qmp("query-cpus-fast", None).unwrap();
        cpus.as_array().is_some_and(|cpus| cpus.len() == 2)
    });
    vm.wait("the agent drops the vCPU", || xps() == "2");
    assert_eq!(vm.report()["state"], "in force");
    // Takes the last vCPU of the applications offline.
    vm.sh("echo 0 >/sys/devices/system/cpu/cpu1/online");
    vm.wait_state("off: this VM has one vCPU; turbo needs a second one for the applications");
    assert_eq!(vm.report()["changes"], json!([]));
    vm.sh("echo 1 >/sys/devices/system/cpu/cpu1/online");
    vm.wait_state("in force");
    vm.end_agent("TERM");
    // Takes the turbo vCPU itself offline.
    vm.start_agent(1);
    vm.wait_state("in force");
    assert!(vm.queues("eth0").iter().all(|q| q == "1"));
    vm.sh("echo 0 >/sys/devices/system/cpu/cpu1/online");
    vm.wait_state("off: this VM has one vCPU; turbo needs a second one for the applications");
    vm.sh("echo 1 >/sys/devices/system/cpu/cpu1/online");
    vm.wait_state("in force");
    vm.wait("interrupts are back on the turbo vCPU", || {
        vm.queues("eth0").iter().all(|q| q == "1")
    });
}

#[test]
#[ignore = "boots an emulated PC: make test-beds"]
fn a_guest_that_cannot_move_interrupts_uses_rps() {
    let vm = Vm::boot(2);
    vm.sh("for n in $(sed -n 's/^ *\\([0-9]*\\):.*virtio.*put.*/\\1/p' /proc/interrupts); do echo 1 >/proc/irq/$n/smp_affinity_list; done; \
           mount --bind /proc/irq /proc/irq; mount -o remount,bind,ro /proc/irq");
    let before = vm.settings();
    vm.start_agent(0);
    vm.wait_state("in force");
    let left = vm.left("interrupts");
    assert!(left.contains("-input.0)"), "{left}");
    let queues = vm.queues("eth0");
    assert!(
        queues.len() >= 4 && queues.iter().all(|q| q == "1"),
        "{queues:?}"
    );
    assert_eq!(vm.sh("cat /sys/class/net/eth0/queues/rx-0/rps_cpus"), "1");
    vm.end_agent("TERM");
    assert_eq!(vm.settings(), before);
}

#[test]
#[ignore = "boots an emulated PC: make test-beds"]
fn irqbalance_leaves_moved_interrupts_alone_until_turbo_ends() {
    let vm = Vm::boot(2);
    vm.sh("mkdir -p /run/irqbalance; irqbalance -f -t 1 </dev/null >/tmp/irqbalance.log 2>&1 & echo $! >/tmp/irqbalance.pid");
    vm.wait("irqbalance listens", || {
        vm.machine.sh("ls /run/irqbalance/*.sock").is_ok()
    });
    let banned = |report: &Value| {
        let all = report["changes"].as_array().unwrap().clone();
        all.into_iter().find(|change| {
            let what = change["what"].as_str().unwrap();
            what.starts_with("interrupts banned in irqbalance")
        })
    };
    vm.start_agent(0);
    vm.wait_state("in force");
    let report = vm.report();
    let ban = banned(&report).unwrap_or_else(|| panic!("{report}"));
    assert_eq!(ban["from"], "", "{ban}");
    // Several rounds of irqbalance with interrupts to balance.
    for _ in 0..4 {
        vm.traffic();
    }
    let queues = vm.queues("eth0");
    assert!(
        queues.len() >= 4 && queues.iter().all(|q| q == "0"),
        "{queues:?}"
    );
    assert_eq!(vm.report()["state"], "in force");
    vm.end_agent("TERM");
    // An irqbalance that does not answer would move the interrupts back. The agent leaves them in place and reports that.
    let settings = vm.queues("eth0");
    vm.sh("kill -STOP $(cat /tmp/irqbalance.pid)");
    vm.start_agent(0);
    vm.wait_state("in force");
    let left = vm.left("interrupts");
    assert!(
        left.contains("does not leave I/O interrupts alone"),
        "{left}"
    );
    assert_eq!(vm.queues("eth0"), settings);
    // Several checks of the agent; when irqbalance answers at last, none of them may have done harm.
    std::thread::sleep(Duration::from_secs(15));
    // Once irqbalance answers again, the agent moves the interrupts, and nothing of its first requests is left.
    vm.sh("kill -CONT $(cat /tmp/irqbalance.pid)");
    vm.wait("interrupts are moved", || {
        vm.queues("eth0").iter().all(|q| q == "0")
    });
    let report = vm.report();
    let ban = banned(&report).unwrap_or_else(|| panic!("{report}"));
    assert_eq!(ban["from"], "", "{ban}");
    vm.end_agent("TERM");
}

#[test]
#[ignore = "boots an emulated PC: make test-beds"]
fn a_guest_with_one_vcpu_keeps_its_settings() {
    let vm = Vm::boot(1);
    let before = vm.settings();
    vm.start_agent(0);
    vm.wait_state("off: this VM has one vCPU; turbo needs a second one for the applications");
    assert_eq!(vm.settings(), before);
    vm.end_agent("TERM");
    assert_eq!(vm.settings(), before);
}
