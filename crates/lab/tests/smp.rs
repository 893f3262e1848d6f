// SPDX-License-Identifier: Apache-2.0
//! Guests with several vCPUs. Needs root, the image that `scripts/lab-image.sh` makes and the
//! kernel that `scripts/uml-smp.sh` makes.
#![allow(clippy::unwrap_used)]

mod support;

use std::time::Duration;

use support::{boot, wait_for};
use viola_lab::load::{Ping, TcpRr, ping, tcp_rr};

const TWO_VCPUS: &str = "[[guest]]\nname = 'a'\ncpus = 2\nkernel_args = ['viola.apps=1']\n\
workloads = [{ kind = 'echo' }, { kind = 'hog' }]\n";

#[test]
#[ignore = "a test bed: its kernel takes minutes to build"]
fn a_guest_has_its_vcpus_and_programs_keep_to_viola_apps() {
    let bench = boot("t-smp", TWO_VCPUS);
    let guest = bench.lab.guest("a").unwrap();
    let sh = |line: &str| {
        let output = guest.exec(&["sh", "-c", line]).unwrap();
        assert_eq!(output.status, 0, "{line}: {}", output.stderr);
        output.stdout.trim().to_owned()
    };
    assert_eq!(sh("grep -c ^processor /proc/cpuinfo"), "2");
    assert_eq!(
        sh("grep Cpus_allowed_list /proc/self/status | cut -f2"),
        "1"
    );
    // One timer per vCPU, the main thread's first.
    let timers = std::fs::read_to_string(format!("/proc/{}/timers", guest.pid())).unwrap();
    assert_eq!(timers.matches("notify: signal/tid.").count(), 2, "{timers}");
    let to = guest.address().unwrap();
    let pings = Ping {
        count: 50,
        ..Ping::default()
    };
    assert_eq!(ping(&bench.lab, to, &pings).unwrap().lost, 0);
    let requests = TcpRr {
        count: 200,
        ..TcpRr::default()
    };
    assert_eq!(tcp_rr(&bench.lab, to, &requests).unwrap().lost, 0);
    // Devices interrupt the first vCPU; each vCPU has a timer of its own (interrupt 0).
    let text = sh("cat /proc/interrupts");
    // SIGCHLD arrives at the vCPU that started the child
    let devices = text.lines().filter(|line| !line.ends_with("SIGCHLD"));
    let counts = devices.filter_map(|line| {
        let (number, rest) = line.trim().split_once(':')?;
        let number: u32 = number.parse().ok()?;
        let counts: Vec<u64> = rest
            .split_whitespace()
            .take(2)
            .map_while(|n| n.parse().ok())
            .collect();
        (number > 0).then_some(counts)
    });
    let sums = counts.fold([0, 0], |sum, c| [sum[0] + c[0], sum[1] + c[1]]);
    assert!(sums[0] > 200 && sums[1] == 0, "{sums:?}: {text}");
}

#[test]
#[ignore = "a test bed: its kernel takes minutes to build"]
fn a_guest_with_two_vcpus_reboots() {
    let bench = boot("t-smp-reboot", TWO_VCPUS);
    let guest = bench.lab.guest("a").unwrap();
    guest.reboot().unwrap();
    wait_for("its work", Duration::from_secs(20), || {
        guest.stat("hog").is_ok_and(|s| s.units > 0)
    });
}
