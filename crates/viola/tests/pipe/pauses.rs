// SPDX-License-Identifier: Apache-2.0
//! A VM that is paused in the middle of a response: no byte arrives until it resumes, and then all of them do.

use std::io::Read;
use std::path::PathBuf;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::{Duration, Instant};

use rustix::process::Signal;
use viola_host::cgroup::Mounts;
use viola_host::proc;

use crate::common::guests::{signal, within};
use crate::rig::{CHANGE_TIMEOUT, MIB, Rig, WebSpec};

/// The time (100 ms) within which a transfer has to stop, plus an allowance for other load on this machine.
const STOP_TIMEOUT: Duration = Duration::from_millis(100 + 900);
/// Longer than the timeout for a silent agent.
const LONG_PAUSE: Duration = Duration::from_secs(12);
const SHORT_PAUSE: Duration = Duration::from_secs(2);

/// All processes of the VM.
fn processes(rig: &Rig) -> Vec<u32> {
    let mut all = vec![rig.guest().pid()];
    let mut next = 0;
    while next < all.len() {
        all.extend(proc::children(all[next]).unwrap());
        next += 1;
    }
    all
}

/// Pauses the VM in the middle of a response and resumes it after `length`.
fn pause_half_way(rig: &Rig, length: Duration, pause: impl FnOnce(), go_on: impl FnOnce()) {
    let mut client = rig.client();
    client.ask("/f1", "");
    let come = Arc::new(AtomicUsize::new(0));
    let counter = come.clone();
    let size = rig.files[1].len();
    let reader = std::thread::spawn(move || {
        let head = client.head().unwrap();
        assert_eq!(head, (200, size));
        let (mut body, mut last) = (Vec::new(), Instant::now());
        let mut some = vec![0; 64 << 10];
        let mut longest = Duration::ZERO;
        while body.len() < size {
            let got = client.0.read(&mut some).unwrap();
            assert!(got > 0, "the connection ended after {} bytes", body.len());
            body.extend_from_slice(&some[..got]);
            counter.store(body.len(), Ordering::SeqCst);
            longest = longest.max(last.elapsed());
            last = Instant::now();
        }
        (client, body, longest)
    });
    within(CHANGE_TIMEOUT, "the transfer has begun", || {
        come.load(Ordering::SeqCst) > 4 * MIB && !rig.work().transfers.is_empty()
    });
    pause();
    std::thread::sleep(STOP_TIMEOUT);
    let so_far = come.load(Ordering::SeqCst);
    assert!(so_far < size, "the transfer ended before the pause");
    std::thread::sleep(length);
    assert_eq!(
        come.load(Ordering::SeqCst),
        so_far,
        "the transfer did not stop"
    );
    assert!(rig.work().paused);
    go_on();
    let (mut client, body, longest) = reader.join().unwrap();
    assert!(body == rig.files[1], "the body differs from the file");
    assert!(longest >= length, "{longest:?}");
    // The VM has its connection back.
    client.fetch("/f0", &rig.files[0]);
    let work = rig.settled(1);
    assert_eq!((work.begun, work.broken), (1, 0), "{work:?}");
    assert!(!work.paused && work.bytes > 38 * MIB as u64, "{work:?}");
}

fn slow(name: &str) -> Rig {
    let rig = Rig::with(&WebSpec {
        name,
        rate: Some(10_000_000),
        ..WebSpec::default()
    });
    rig.start_nginx();
    rig
}

#[test]
fn a_stopped_guest_is_paused_and_continues_where_it_was() {
    let rig = slow("pi-stop");
    let all = processes(&rig);
    let tell = |what| all.iter().for_each(|pid| signal(*pid, what));
    let (stop, go_on) = (|| tell(Signal::STOP), || tell(Signal::CONT));
    pause_half_way(&rig, LONG_PAUSE, stop, go_on);
}

#[test]
fn a_frozen_guest_is_paused_and_continues_where_it_was() {
    let rig = slow("pi-freeze");
    let group = Group::with(&processes(&rig));
    // The daemon checks once a second which control groups its VMs are in.
    std::thread::sleep(Duration::from_secs(4));
    let (stop, go_on) = (|| group.freeze(true), || group.freeze(false));
    pause_half_way(&rig, SHORT_PAUSE, stop, go_on);
}

/// A cgroup v2 control group for a VM.
struct Group(PathBuf);

impl Group {
    fn with(processes: &[u32]) -> Self {
        let mounts = Mounts::read().unwrap();
        let here = mounts.unified(std::process::id()).unwrap();
        let group = here
            .expect("a hierarchy of version 2")
            .join("viola-test-freeze");
        // A previous, killed test may have left the group.
        drop(Self(group.clone()));
        std::fs::create_dir(&group).unwrap();
        let group = Self(group);
        for pid in processes {
            // A process may have exited meanwhile.
            let _ = std::fs::write(group.0.join("cgroup.procs"), pid.to_string());
        }
        group
    }

    fn freeze(&self, freeze: bool) {
        let digit = if freeze { "1" } else { "0" };
        std::fs::write(self.0.join("cgroup.freeze"), digit).unwrap();
    }
}

impl Drop for Group {
    fn drop(&mut self) {
        let _ = std::fs::write(self.0.join("cgroup.freeze"), "0");
        let all = std::fs::read_to_string(self.0.join("cgroup.procs")).unwrap_or_default();
        let above = self.0.parent().unwrap().join("cgroup.procs");
        for pid in all.lines() {
            let _ = std::fs::write(&above, pid);
        }
        let _ = std::fs::remove_dir(&self.0);
    }
}
