// SPDX-License-Identifier: Apache-2.0
//! An operator's host: an emulated PC with Debian, systemd, libvirt and small libvirt VMs.

use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use serde_json::Value;
use viola_lab::qemu::QemuVm;
use viola_proto::{VmList, VmReport};

use crate::debian::{self, run};

/// Timeout of one script.
pub const SCRIPT_TIMEOUT: Duration = Duration::from_secs(900);
/// Timeout of an expected change in an emulated host on a busy machine.
pub const CHANGE_TIMEOUT: Duration = Duration::from_secs(300);
/// Number of VMs. The first one only answers pings; the others have load while [`Host::busy`] is set.
pub const VMS: u32 = 3;

/// The host before viola is installed: a bridge, and VMs on core 1 that answer at 10.20.0.1N.
const SET_UP: &str = r#"
    set -e
    ip link add br0 type bridge stp_state 0 forward_delay 0 mcast_snooping 0
    ip addr add 10.20.0.1/24 dev br0; ip link set br0 up
    for i in $(seq $VMS); do
        n=db0$i
        cat >/root/$n.xml <<XML
<domain type='kvm'><name>$n</name><memory unit='MiB'>128</memory><vcpu placement='static' cpuset='1'>1</vcpu>
<os><type arch='x86_64' machine='q35'>hvm</type><kernel>/srv/guests/vmlinuz</kernel><initrd>/srv/guests/initrd.img</initrd>
<cmdline>console=ttyS0 rdinit=/boot mitigations=off tsc=reliable no_timer_check quiet net.ifnames=0 address=10.20.0.1$i</cmdline></os>
<cpu mode='host-passthrough'/><features><acpi/></features><on_reboot>restart</on_reboot>
<devices><interface type='bridge'><source bridge='br0'/><model type='virtio'/><mac address='52:54:00:20:00:0$i'/></interface>
<serial type='file'><source path='/var/log/libvirt/qemu/$n.console'/></serial><memballoon model='none'/></devices></domain>
XML
        virsh -q define /root/$n.xml
    done
    echo set up"#;

/// Starts VM `$i` and waits for its answer.
const START: &str = r#"
    set -e
    virsh -q start db0$i
    for try in $(seq 90); do ping -c 1 -W 1 10.20.0.1$i >/dev/null && break; done
    ping -c 1 -W 5 10.20.0.1$i >/dev/null"#;

pub struct Host {
    pub machine: QemuVm,
    _folder: tempfile::TempDir,
}

/// The package for hosts from `scripts/deb.sh --debug`.
fn package() -> PathBuf {
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../build/deb/debug");
    let name = format!("viola_{}-1_amd64.deb", env!("CARGO_PKG_VERSION"));
    let package = folder.join(&name);
    assert!(
        package.exists(),
        "there is no build/deb/debug/{name}; run scripts/deb.sh --debug"
    );
    package
}

/// The package and a copy with a higher version, in the layout of `make deb`.
fn pack(folder: &Path) -> PathBuf {
    let package = package();
    let text = |path: &Path| path.display().to_string();
    let deb = folder.join("build/deb");
    std::fs::create_dir_all(&deb).unwrap();
    std::fs::copy(&package, deb.join(package.file_name().unwrap())).unwrap();
    let tree = folder.join("tree");
    run("dpkg-deb", &["-R", &text(&package), &text(&tree)]);
    let control = tree.join("DEBIAN/control");
    let words = std::fs::read_to_string(&control).unwrap();
    let words: Vec<String> = words
        .lines()
        .map(|l| match l.starts_with("Version:") {
            true => "Version: 99.0-1".into(),
            false => l.to_owned(),
        })
        .collect();
    std::fs::write(&control, words.join("\n") + "\n").unwrap();
    let next = text(&deb.join("viola_99.0-1_amd64.deb"));
    run(
        "dpkg-deb",
        &["--root-owner-group", "-b", &text(&tree), &next],
    );
    let archive = folder.join("packages.tar");
    run(
        "tar",
        &["-cf", &text(&archive), "-C", &text(folder), "build"],
    );
    archive
}

impl Host {
    /// Boots the host with VMs and the packages in /root/build/deb.
    pub fn boot() -> Self {
        let begin = Instant::now();
        let folder = tempfile::tempdir().unwrap();
        let packages = pack(folder.path());
        let disks = [("packages", packages.as_path(), "raw")];
        let machine = debian::boot("operator", folder.path(), &disks, SCRIPT_TIMEOUT);
        let host = Self {
            machine,
            _folder: folder,
        };
        host.step(begin, "the host is up");
        host.good("tar -x -f /dev/vdb -C /root");
        let said = host.good(&format!("VMS={VMS}; {SET_UP}"));
        assert!(said.ends_with("set up\n"), "{said}");
        for i in 1..=VMS {
            host.good(&format!("i={i}; {START}"));
            host.step(begin, &format!("db0{i} answers"));
        }
        host
    }

    /// Sets whether the other VMs are busy. They are idle between measurements, to save this machine's time.
    pub fn busy(&self, are: bool) {
        let word = if are { "busy" } else { "idle" };
        for i in 2..=VMS {
            let said = self.good(&format!(
                "exec bash -c 'exec 3<>/dev/tcp/10.20.0.1{i}/9; echo {word} >&3; read -t 60 -u 3 said; echo $said'"
            ));
            assert_eq!(said.trim(), word, "db0{i}");
        }
    }

    /// Waits this many seconds by the host's own clock, which differs from this machine's.
    pub fn pause(&self, seconds: u32) {
        self.good(&format!("sleep {seconds}"));
    }

    pub fn step(&self, begin: Instant, what: &str) {
        println!("{:4.0} s: {what}", begin.elapsed().as_secs_f32());
    }

    /// Runs a script and returns its output, whatever its exit status.
    pub fn sh(&self, script: &str) -> String {
        let output = self
            .machine
            .exec(&format!("cd /root; {script}"), SCRIPT_TIMEOUT)
            .unwrap();
        assert!(!output.timed_out, "{script}: {output:?}\n{}", self.log());
        format!("{}{}", output.stdout, output.stderr)
    }

    /// Runs a script, asserts that it succeeds, and returns its output.
    pub fn good(&self, script: &str) -> String {
        let output = self
            .machine
            .exec(&format!("cd /root; {script}"), SCRIPT_TIMEOUT)
            .unwrap();
        let is_good = !output.timed_out && output.status == 0;
        assert!(is_good, "{script}: {output:?}\n{}", self.log());
        format!("{}{}", output.stdout, output.stderr)
    }

    pub fn log(&self) -> String {
        let tail =
            "journalctl -u viola -u libvirtd --no-pager | tail -n 60; virsh list --all; uptime";
        let output = self.machine.exec(tail, SCRIPT_TIMEOUT);
        output.map_or_else(|e| e.to_string(), |o| o.stdout)
    }

    /// The daemon's list of VMs; empty while it does not answer.
    pub fn vms(&self) -> Vec<VmReport> {
        let text = self.sh("viola vms --json 2>/dev/null");
        let list: Option<VmList> = serde_json::from_str(&text).ok();
        list.map_or_else(Vec::new, |list| list.vms)
    }

    pub fn vm(&self, name: &str) -> Option<VmReport> {
        self.vms().into_iter().find(|vm| vm.name == name)
    }

    /// A value of `/metrics`.
    pub fn metric(&self, name: &str) -> Option<f64> {
        let text = self.sh("curl -s --unix-socket /run/viola/viola.sock http://viola/metrics");
        let mut values = text
            .lines()
            .filter_map(|l| l.strip_prefix(name)?.strip_prefix(' '));
        values.next()?.trim().parse().ok()
    }

    /// Waits until a condition is true and returns the time that it took.
    pub fn until(&self, what: &str, is_so: impl Fn() -> bool) -> Duration {
        let begin = Instant::now();
        while !is_so() {
            assert!(
                begin.elapsed() < CHANGE_TIMEOUT,
                "not {what}:\n{}\n{}",
                self.sh("viola vms; viola check"),
                self.log()
            );
            std::thread::sleep(Duration::from_millis(300));
        }
        begin.elapsed()
    }

    /// Waits until a VM is scheduled by this mechanism, in this class.
    pub fn until_scheduled(&self, name: &str, class: &str, by: &str) {
        self.until(&format!("{name} of class {class} by {by}"), || {
            let vm = self.vm(name);
            let said = vm.and_then(|vm| serde_json::to_value(vm).ok());
            said.is_some_and(|vm: Value| vm["class"] == class && vm["scheduled_by"] == by)
        });
    }

    /// Number of real-time vCPU threads.
    pub fn real_time(&self) -> u32 {
        let text = self.sh("ps -eLo cls,comm | grep -c '^ *FF.*CPU [0-9]*/'");
        let first = text.lines().next();
        first.and_then(|n| n.trim().parse().ok()).unwrap_or(0)
    }

    /// The first VM's response times in ms: median and 99th percentile of `count` pings.
    pub fn answers(&self, count: u32) -> (f64, f64) {
        let text = self.sh(&format!("ping -c {count} -i 0.1 10.20.0.11"));
        let mut times: Vec<f64> = text
            .lines()
            .filter_map(|l| l.split_once("time=")?.1.split(' ').next()?.parse().ok())
            .collect();
        assert!(
            times.len() as u32 * 10 > count * 9,
            "answers were lost: {text}"
        );
        times.sort_by(f64::total_cmp);
        (times[times.len() / 2], times[times.len() * 99 / 100])
    }
}
