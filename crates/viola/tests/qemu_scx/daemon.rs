// SPDX-License-Identifier: Apache-2.0
//! `viola run` with sched_ext over real VMs, and its faults.

use std::path::Path;
use std::time::{Duration, Instant};

use serde_json::Value;
use viola_lab::Paths;

use super::host::Host;

/// The daemon's whole configuration. One VM is latency-sensitive and has twice the other's weight; only viola knows both.
const CONFIG: &str = r#"[daemon]
socket = "/tmp/v.sock"
group = "root"
run_dir = "/tmp/vr"
state_dir = "/tmp/vs"
[slices]
cores = "1"
mechanism = ["sched_ext", "eevdf"]
[[vm]]
name = "g1"
class = "ls"
weight = 512
"#;

/// Timeout for a thread that the daemon did not see start to join its VM; the emulated host is slow.
const JOIN_TIMEOUT: Duration = Duration::from_secs(30);

/// The guest's program: it counts, and starts a process now and then.
const GUEST: &str = r#"#!/usr/bin/busybox sh
i=0
while :; do
    i=$((i + 1))
    [ $((i % 1000)) = 0 ] && (echo tick $i)
done
"#;

/// Two VMs on core 1.
struct Bed {
    host: Host,
    begin: Instant,
}

impl Bed {
    fn boot() -> Self {
        let begin = Instant::now();
        let paths = Paths::find_from([Path::new(env!("CARGO_MANIFEST_DIR"))]);
        let paths = paths.unwrap_or_else(|e| panic!("{e}"));
        let kernel = paths.kernel(1).unwrap();
        let host = Host::boot("scx-run", std::slice::from_ref(&kernel));
        let linux = kernel.display();
        host.sh(&format!(
            "mkdir -p /tmp/uml; cat >/guest <<'E'\n{GUEST}E\nchmod 755 /guest; cat >/tmp/v.toml <<'E'\n{CONFIG}E\n\
             for g in g1 g2; do env -u LD_LIBRARY_PATH TMPDIR=/dev/shm taskset 2 {linux} umid=$g uml_dir=/tmp/uml mem=48M root=/dev/root \
             rootfstype=hostfs rootflags=/ ro init=/guest seccomp=on con=null con0=null,fd:1 \
             </dev/null >/tmp/$g.log 2>&1 & all=\"$all $!\"; done; \
             n=0; for p in $all; do until /viola/bin/viola register $p; do n=$((n + 1)); [ $n -gt 100 ] && exit 1; sleep 0.2; done; done"
        ));
        let bed = Self { host, begin };
        bed.until("grep -q tick /tmp/g1.log && grep -q tick /tmp/g2.log", 120);
        bed.step("two guests are up");
        bed
    }

    /// Prints a step and the elapsed time.
    fn step(&self, what: &str) {
        println!("{:4.0} s  {what}", self.begin.elapsed().as_secs_f64());
    }

    /// Waits until a script succeeds.
    fn until(&self, script: &str, seconds: u32) {
        let tries = seconds * 5;
        let said = self.host.sh(&format!(
            "n=0; until {script}; do n=$((n + 1)); [ $n -gt {tries} ] && echo never && break; sleep 0.2; done"
        ));
        assert!(!said.contains("never"), "{script}: {}", self.everything());
    }

    /// Starts a daemon with an empty log.
    fn start(&self) {
        self.host.sh(
            "/viola/bin/viola run -c /tmp/v.toml </dev/null >/tmp/v.log 2>&1 & echo $! >/tmp/v.pid",
        );
    }

    /// Waits until the daemon has logged this text `times` times.
    fn wait_logged(&self, what: &str, times: u32) {
        self.until(
            &format!("[ $(grep -c \"{what}\" /tmp/v.log) -ge {times} ]"),
            90,
        );
        self.step(what);
    }

    fn log(&self) -> String {
        self.host.sh("cat /tmp/v.log")
    }

    fn everything(&self) -> String {
        self.host.sh("tail -n 30 /tmp/v.log; tail -n 5 /tmp/g1.log /tmp/g2.log; dmesg | tail -n 15; cat /sys/kernel/sched_ext/state")
    }

    /// Number of the VMs' threads that sched_ext schedules, and of those that it does not.
    fn threads(&self) -> (usize, usize) {
        let text = self.host.sh(
            "for c in $(grep -lE '^(linux.uml|uml-userspace)' /proc/[0-9]*/comm); do \
             cat ${c%comm}task/*/sched 2>/dev/null | grep ext.enabled; done",
        );
        let ours = text.lines().filter(|l| l.trim_end().ends_with('1')).count();
        (ours, text.lines().count() - ours)
    }

    /// Progress of both guests in two seconds.
    fn ticks(&self) -> [u64; 2] {
        let text = self
            .host
            .sh("t() { for g in g1 g2; do grep -c tick /tmp/$g.log; done; }; t; sleep 2; t");
        let n: Vec<u64> = text.lines().map(|l| l.parse().unwrap()).collect();
        [n[2] - n[0], n[3] - n[1]]
    }

    fn ask(&self, words: &str) -> String {
        self.host.sh(&format!("viola {words} --socket /tmp/v.sock"))
    }

    fn json(&self, words: &str) -> Value {
        let text = self.ask(&format!("{words} --json"));
        serde_json::from_str(&text).unwrap_or_else(|e| panic!("{e}: {text}"))
    }

    /// Asserts that both VMs get their shares by weight, by sched_ext.
    fn assert_slices(&self) {
        // A thread that started during the daemon's scan is found by the next scan and runs in the fair class until then.
        let end = Instant::now() + JOIN_TIMEOUT;
        let (ours, others) = loop {
            match self.threads() {
                (_, others) if others > 0 && Instant::now() < end => {}
                threads => break threads,
            }
        };
        assert!(
            ours >= 4 && others == 0,
            "{ours} threads of {}",
            ours + others
        );
        // A core that goes offline loses the VMs' affinity to it. The daemon's next scan sees that they are on one core again. And
        // while the kernel switches schedulers it runs threads in turn by itself (bypass).
        let end = Instant::now() + JOIN_TIMEOUT;
        let (list, used) = loop {
            self.host.sh("sleep 2");
            let list = self.json("vms");
            let vms = list["vms"].as_array().unwrap();
            let used: Vec<f64> = vms.iter().map(|v| v["used"].as_f64().unwrap()).collect();
            let is_settled = (used[0] - 0.667).abs() < 0.05
                && vms.iter().all(|v| v["cores"] == serde_json::json!([1]));
            if is_settled || Instant::now() > end {
                break (list, used);
            }
            let bypass = "grep -i bypass /sys/kernel/sched_ext/root/events";
            println!(
                "        not settled: used {used:?}; {}",
                self.host.sh(bypass)
            );
        };
        let vms = list["vms"].as_array().unwrap();
        println!(
            "        used {used:?}, turns {} {}",
            vms[0]["turns"], vms[1]["turns"]
        );
        assert!((used[0] - 0.667).abs() < 0.05, "{list}");
        assert!((used[1] - 0.333).abs() < 0.05, "{list}");
        for vm in vms {
            assert_eq!(vm["scheduled_by"], "sched_ext", "{list}");
            assert!(
                vm["turns"]["run_ns"].as_u64().unwrap() > 100_000_000,
                "{list}"
            );
            assert!(vm["turns"]["waits"].as_u64().unwrap() > 10, "{list}");
        }
        assert_eq!(self.host.state(), "enabled");
    }

    /// Asserts that both VMs run in the fair class.
    fn assert_stock(&self) {
        let (ours, others) = self.threads();
        assert!(
            ours == 0 && others >= 4,
            "{ours} threads of {}",
            ours + others
        );
        assert_eq!(self.host.state(), "disabled");
        let ticks = self.ticks();
        println!("        ticks {ticks:?}");
        assert!(ticks[0] > 0 && ticks[1] > 0, "{}", self.everything());
    }
}

#[test]
#[ignore = "boots an emulated PC with guests in it: make test-beds"]
fn real_vms_keep_their_shares_through_every_fault() {
    let bed = Bed::boot();
    bed.start();
    bed.wait_logged("runs by /tmp/v.toml", 1);
    bed.wait_logged("core 1: sched_ext on, since g1 is latency-sensitive", 1);
    bed.assert_slices();
    let (vms, status) = (bed.ask("vms"), bed.ask("status"));
    println!("{vms}{status}");
    assert!(
        vms.lines()
            .all(|l| l.contains("sched_ext") || l.contains("NAME")),
        "{vms}"
    );
    assert!(
        status.contains("slices: running: sched_ext on 1 core"),
        "{status}"
    );
    let check = bed.ask("check");
    assert!(check.contains("slices: sched_ext  yes"), "{check}");

    // The core goes offline and comes back.
    bed.host.sh("echo 0 >/sys/devices/system/cpu/cpu1/online");
    bed.wait_logged("core 1: back to stock scheduling, since", 1);
    bed.assert_stock();
    bed.host.sh("echo 1 >/sys/devices/system/cpu/cpu1/online");
    bed.wait_logged("core 1: sched_ext on", 2);
    bed.assert_slices();

    // The daemon is killed; the next one loads the scheduler again.
    bed.host.sh("kill -9 $(cat /tmp/v.pid); sleep 1");
    bed.step("killed");
    bed.assert_stock();
    bed.start();
    bed.wait_logged("an earlier run was cut short: put back", 1);
    bed.wait_logged("core 1: sched_ext on", 1);
    bed.assert_slices();

    // A fair-class program occupies the core while the kernel's server for sched_ext is off: a thread waits for 5 s.
    bed.host.sh(
        "mount -t debugfs d /sys/kernel/debug; echo 0 >/sys/kernel/debug/sched/ext_server/cpu1/runtime; \
         (while :; do :; done) & echo $! >/tmp/hog; taskset -p 2 $! >/dev/null",
    );
    bed.wait_logged(
        "sched_ext: the kernel ended the scheduler, since a thread had waited for 5 s",
        1,
    );
    bed.host
        .sh("kill $(cat /tmp/hog); echo 50000000 >/sys/kernel/debug/sched/ext_server/cpu1/runtime");
    bed.wait_logged("core 1: sched_ext on", 2);
    bed.assert_slices();
    for times in [1, 2] {
        bed.host.sh("echo S >/proc/sysrq-trigger");
        bed.wait_logged("sched_ext: SysRq S ended the scheduler", times);
        if times == 1 {
            bed.wait_logged("core 1: sched_ext on", 3);
        }
    }
    bed.wait_logged(
        "slices: eevdf; no sched_ext: it failed: SysRq S ended the scheduler",
        1,
    );
    bed.assert_stock();
    let status = bed.ask("status");
    assert!(status.contains("running: eevdf"), "{status}");
    // The operator has fixed the cause and starts slices again.
    bed.ask("start");
    bed.wait_logged("core 1: sched_ext on", 4);
    bed.assert_slices();
    bed.host
        .sh("kill $(cat /tmp/v.pid); while [ -e /proc/$(cat /tmp/v.pid) ]; do sleep 0.1; done");
    bed.assert_stock();

    // This kernel refuses to load the scheduler.
    bed.host.sh(
        "mount -t securityfs s /sys/kernel/security; echo confidentiality >/sys/kernel/security/lockdown",
    );
    bed.start();
    bed.wait_logged(
        "slices: eevdf; no sched_ext: the kernel refused viola's sched_ext scheduler at loading",
        1,
    );
    bed.assert_stock();
    println!("{}", bed.log());
}
