// SPDX-License-Identifier: Apache-2.0
//! The meter on this process, by schedstat, which needs no privilege.

use std::net::UdpSocket;
use std::time::{Duration, Instant};

use viola_host::{CpuSet, Hypervisor, Nic, NicKind, Thread, Vcpu, proc};

use super::*;
use crate::acct::AccountTimes;

/// This thread as a VM of one vCPU whose NIC is the loopback interface.
fn me(name: &str) -> Vm {
    let pid = std::process::id();
    let tid = rustix::thread::gettid().as_raw_nonzero().get() as u32;
    let start_time = |tid| proc::stat(tid).unwrap().unwrap().start_time;
    Vm {
        id: VmId::new(Hypervisor::Qemu, name),
        name: name.into(),
        hypervisor: Hypervisor::Qemu,
        pid,
        start_time: start_time(pid),
        vcpus: vec![Vcpu {
            index: 0,
            threads: vec![Thread {
                pid,
                tid,
                start_time: start_time(tid),
            }],
            kernel_thread: None,
            cores: CpuSet::new(),
        }],
        service: Vec::new(),
        disks: Vec::new(),
        nics: vec![Nic {
            tap: "lo".into(),
            kind: NicKind::Raw,
            mac: None,
            netns: proc::netns(pid).unwrap().unwrap(),
            ifindex: Some(1),
        }],
        cgroup: None,
        cores: CpuSet::new(),
        status: None,
        uuid: None,
        libvirt: false,
        confirmed: None,
    }
}

/// Longest tick of a kernel, ns: schedstat gets the time of a thread that runs at ticks, so up to one tick late.
const TICK: u64 = 10_000_000;

fn spin(span: Duration) {
    let begin = Instant::now();
    while begin.elapsed() < span {
        std::hint::spin_loop();
    }
}

#[test]
fn a_snapshot_covers_the_time_since_the_last_one_however_often_times_were_read() {
    let mut meter = Meter::sampled();
    meter.follow(&[me("a")]).unwrap();
    meter.snapshot();
    let (from, to) = (
        UdpSocket::bind("127.0.0.1:0").unwrap(),
        UdpSocket::bind("127.0.0.1:0").unwrap(),
    );
    for _ in 0..50 {
        from.send_to(&[0; 100], to.local_addr().unwrap()).unwrap();
    }
    for _ in 0..3 {
        spin(Duration::from_millis(10));
        meter.read_times();
    }
    assert_eq!(meter.history().len(), 1);
    let whole = meter.snapshot().clone();
    let vcpu = whole.vms[0].vcpus[0];
    // A busy machine gives this thread a part of the time.
    assert!(
        vcpu.run >= 5_000_000 && vcpu.run <= whole.span + TICK,
        "{whole:?}"
    );
    assert!(whole.span >= 30_000_000);
    assert!(whole.vms[0].traffic.rx_packets >= 50, "{whole:?}");
    let next = meter.snapshot().clone();
    // Nothing is counted twice.
    let sum = vcpu.run + next.vms[0].vcpus[0].run;
    assert!(sum <= whole.span + next.span + TICK, "{whole:?} {next:?}");
    assert_eq!(next.at - next.span, whole.at);
}

#[test]
fn spent_is_the_time_since_the_last_call() {
    let at = |run, wait| AccountTimes {
        run,
        wait,
        ..AccountTimes::default()
    };
    let mut reading = Reading {
        is_used: true,
        before: at(100, 10),
        now: at(160, 15),
    };
    let spent = reading.spent(80);
    assert_eq!((spent.run, spent.wait, spent.blocked), (60, 5, 15));
    assert_eq!(reading.spent(80).run, 0);
    reading.now = at(300, 15);
    let spent = reading.spent(80);
    assert_eq!((spent.run, spent.blocked), (140, 0), "never below nothing");
}

#[test]
fn a_reused_snapshot_keeps_no_old_values() {
    let mut meter = Meter::sampled();
    meter.follow(&[me("a"), me("b")]).unwrap();
    let long_ago = now() - 60 * SECOND;
    for _ in 0..MIN_HISTORY + 9 {
        let mut old = Snapshot {
            at: long_ago,
            ..Snapshot::default()
        };
        meter.fit_vms(&mut old);
        old.vms[0].traffic.rx_packets = u64::MAX;
        old.vms[1].vcpus[0].run = u64::MAX;
        old.vms[1].service.wait = 5;
        meter.history.push_back(old);
    }
    meter.snapshot();
    let new = meter.snapshot().clone();
    assert_eq!(new.vms.len(), 2);
    assert_ne!(new.vms[0].traffic.rx_packets, u64::MAX);
    assert!(new.vms[1].vcpus[0].run < 10 * SECOND);
    assert_eq!(new.vms[1].service.wait, 0);
    // Others are followed than the old one had room for.
    meter.follow(&[me("b")]).unwrap();
    let ids: Vec<VmId> = meter.snapshot().vms.iter().map(|s| s.id.clone()).collect();
    assert_eq!(ids, [me("b").id]);
    for _ in 0..20 {
        meter.snapshot();
    }
    assert_eq!(meter.history().len(), MIN_HISTORY, "old ones go");
}

#[test]
fn disk_traffic_before_a_vm_was_followed_does_not_count() {
    let folder = std::env::current_exe().unwrap();
    let file = folder.with_file_name(format!("written-{}", std::process::id()));
    std::fs::write(&file, vec![1; 1 << 20]).unwrap();
    std::fs::remove_file(&file).unwrap();
    let mut meter = Meter::sampled();
    meter.snapshot();
    meter.follow(&[me("a")]).unwrap();
    let written = |m: &Meter| m.disks.read(&m.followed[0]).unwrap().write_bytes;
    assert!(
        written(&meter) >= 1 << 20,
        "the test's programs lie on no disk"
    );
    assert!(!meter.snapshot().with_disks);
    meter.disks_at = 0;
    let first = meter.snapshot().clone();
    assert!(first.with_disks);
    assert!(first.vms[0].traffic.disk_written < 1 << 20, "{first:?}");
}

#[test]
fn the_history_is_bounded() {
    let mut meter = Meter::sampled();
    for _ in 0..MAX_HISTORY + 50 {
        meter.snapshot();
    }
    assert_eq!(meter.history().len(), MAX_HISTORY);
    let newest = meter
        .history()
        .iter()
        .rev()
        .zip(meter.history().iter().rev().skip(1));
    assert!(newest.into_iter().all(|(new, old)| new.at >= old.at));
}

#[test]
fn without_bpf_single_waits_and_packets_are_absent_and_not_zero() {
    let mut meter = Meter::sampled();
    meter.follow(&[me("a")]).unwrap();
    meter.snapshot();
    // schedstat grows at the scheduler's tick.
    let deadline = Instant::now() + Duration::from_secs(10);
    while meter.snapshot().vms[0].vcpus[0].run == 0 {
        assert!(Instant::now() < deadline, "times are known");
        spin(Duration::from_millis(5));
    }
    let id = me("a").id;
    assert_eq!(meter.vm_waits(&id), None);
    assert_eq!(meter.delays(&id), None);
    assert_eq!(meter.packet_delay_total(&id), None);
    let why = meter.unseen(&id).unwrap();
    assert_eq!(why.to_string(), "without BPF viola cannot see packets");
    assert!(meter.watch_packets(&[(id, 1)]).unwrap().is_empty());
}

#[test]
fn vms_that_nobody_confirms_leave_room_for_others() {
    let mut meter = Meter::sampled();
    let forged: Vec<Vm> = (0..MAX_VMS).map(|i| me(&format!("forged{i}"))).collect();
    let left_out = meter.follow(&forged).unwrap();
    let taken = 2 * (forged.len() - left_out.len());
    assert!(taken <= MAX_UNCONFIRMED_ACCOUNTS && taken + 2 > MAX_UNCONFIRMED_ACCOUNTS);
    let real = |name: &str| Vm {
        confirmed: Some(viola_host::confirm::Confirmation::Libvirt),
        ..me(name)
    };
    let mut all = forged;
    all.push(real("real"));
    assert!(!meter.follow(&all).unwrap().contains(&real("real").id));
    // One of them is confirmed later.
    let last = left_out.last().unwrap().clone();
    let name = last.as_str().strip_prefix("qemu:").unwrap().to_owned();
    all.retain(|vm| vm.id != last);
    all.push(real(&name));
    assert!(!meter.follow(&all).unwrap().contains(&last));
}
