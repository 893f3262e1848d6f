// SPDX-License-Identifier: Apache-2.0
//! `viola run` with sched_ext and `[turbo]` cores, over processes that look like QEMU VMs with two vCPUs.

use std::time::Duration;

use serde_json::Value;

use super::host::Host;

const CONFIG: &str = r#"[daemon]
socket = "/tmp/v.sock"
group = "root"
run_dir = "/tmp/vr"
state_dir = "/tmp/vs"
[slices]
cores = "1"
mechanism = ["sched_ext", "eevdf"]
[turbo]
cores = "2"
[[vm]]
name = "q1"
class = "turbo"
weight = 512
[[vm]]
name = "q2"
class = "turbo"
"#;

struct Bed(Host);

impl Bed {
    /// Both vCPUs of each VM are always runnable.
    fn boot() -> Self {
        let host = Host::boot_with("scx-turbo-run", 3, &[]);
        host.sh(&format!(
            "cat >/tmp/v.toml <<'E'\n{CONFIG}E\ncp /viola/bin/viola-lab /tmp/qemu-system-x86_64; \
             for q in q1 q2; do taskset 6 /tmp/qemu-system-x86_64 internal stand vm 2 1000 0 -name $q </dev/null >/dev/null 2>&1 & done"
        ));
        Self(host)
    }

    fn start(&self) {
        self.0.sh(
            "/viola/bin/viola run -c /tmp/v.toml </dev/null >/tmp/v.log 2>&1 & echo $! >/tmp/v.pid",
        );
    }

    /// Waits until the daemon has logged this text `times` times.
    fn wait_logged(&self, what: &str, times: u32) {
        let said = self.0.sh(&format!(
            "n=0; until [ $(grep -c \"{what}\" /tmp/v.log) -ge {times} ]; do \
             n=$((n + 1)); [ $n -gt 450 ] && echo never && break; sleep 0.2; done"
        ));
        assert!(!said.contains("never"), "{what}: {}", self.log());
    }

    fn log(&self) -> String {
        self.0
            .sh("cat /tmp/v.log; viola vms --socket /tmp/v.sock; dmesg | tail -n 5")
    }

    fn vms(&self) -> Value {
        let text = self.0.sh("viola vms --json --socket /tmp/v.sock");
        serde_json::from_str(&text).unwrap_or_else(|e| panic!("{e}: {text}"))
    }

    /// Run time (ns) and core of each vCPU: q1's first and second, then q2's.
    fn vcpus(&self) -> Vec<(u64, u32)> {
        let text = self.0.sh(
            "for q in q1 q2; do for p in /proc/[0-9]*; do case $(readlink $p/exe) in *qemu-system*) \
             tr '\\0' ' ' <$p/cmdline | grep -q -- \"-name $q\" && break;; esac; done; for v in 0 1; do \
             for t in $p/task/*; do grep -q \"CPU $v/TCG\" $t/comm && \
             echo $(cut -d' ' -f1 $t/schedstat) $(sed -n 's/Cpus_allowed_list:.//p' $t/status); done; done; done",
        );
        let line = |line: &str| {
            let (ran, core) = line.split_once(' ')?;
            Some((ran.parse().ok()?, core.trim().parse().ok()?))
        };
        let all: Vec<_> = text.lines().filter_map(line).collect();
        assert_eq!(all.len(), 4, "{text}");
        all
    }

    /// Asserts that the first vCPUs are on the turbo core and the others on the regular one, and that q1 gets twice q2's share
    /// of both together.
    fn assert_turbo(&self) {
        std::thread::sleep(Duration::from_secs(1));
        let before = self.vcpus();
        self.0.sh("sleep 3");
        let after = self.vcpus();
        let ran: Vec<f64> = std::iter::zip(&before, &after)
            .map(|(b, a)| (a.0 - b.0) as f64 / 1e9)
            .collect();
        println!("        ran {ran:.2?}");
        let cores: Vec<u32> = after.iter().map(|v| v.1).collect();
        assert_eq!(cores, [2, 1, 2, 1], "{}", self.log());
        let all: f64 = ran.iter().sum();
        let first = (ran[0] + ran[1]) / all;
        assert!((first - 2.0 / 3.0).abs() < 0.03, "{ran:?}");
        assert!(ran[0] > 0.1 * all && ran[2] > 0.1 * all, "{ran:?}");
        let list = self.vms();
        for vm in list["vms"].as_array().unwrap() {
            assert_eq!(vm["scheduled_by"], "sched_ext", "{list}");
            assert_eq!(vm["class"], "turbo", "{list}");
        }
        assert_eq!(self.0.state(), "enabled");
    }
}

#[test]
#[ignore = "boots an emulated PC: make test-beds"]
fn vms_of_class_turbo_get_both_cores_by_sched_ext() {
    let bed = Bed::boot();
    bed.start();
    bed.wait_logged("core 2: sched_ext on", 1);
    bed.assert_turbo();
    let check = bed
        .0
        .sh("viola check --config /tmp/v.toml --socket /tmp/v.sock");
    assert!(check.contains("turbo cores"), "{check}");
    assert!(!check.contains("it needs slots"), "{check}");

    // The turbo core goes offline. The kernel ends the scheduler, and the VMs continue with ordinary slices or stock scheduling.
    bed.0.sh("echo 0 >/sys/devices/system/cpu/cpu2/online");
    bed.wait_logged(
        "q1: stock scheduling: it has no turbo vCPU: core 2 is offline",
        1,
    );
    let said = bed.0.sh("sleep 2; viola vms --socket /tmp/v.sock");
    assert!(said.contains("q1") && said.contains("q2"), "{said}");
    bed.0.sh("echo 1 >/sys/devices/system/cpu/cpu2/online");
    bed.wait_logged("core 2: sched_ext on", 2);
    bed.assert_turbo();

    // The daemon is killed: no thread may stay in the scheduler's class.
    let left = bed.0.sh(
        "kill -9 $(cat /tmp/v.pid); sleep 1; cat /sys/kernel/sched_ext/state; \
         for p in /proc/[0-9]*; do case $(readlink $p/exe) in *qemu-system*) cat $p/task/*/sched;; esac; done | grep -c 'ext.enabled.* 1$'",
    );
    let left: Vec<&str> = left.split_whitespace().collect();
    assert_eq!(left, ["disabled", "0"]);
    bed.start();
    bed.wait_logged("core 2: sched_ext on", 1);
    bed.assert_turbo();
}
