// SPDX-License-Identifier: Apache-2.0
//! The host sends files that clients request from nginx.

use std::io::Read;
use std::time::{Duration, Instant};

use crate::common::guests::within;
use crate::common::stdout;
use crate::rig::MIB;
use crate::vm::{CHANGE_TIMEOUT, Disk, Vm};

const SIZES: [usize; 2] = [MIB, 40 * MIB];

#[test]
#[ignore = "boots emulated PCs: make test-beds"]
fn files_of_a_qemu_guest_are_sent_by_the_host() {
    let vm = Vm::boot("qp-send", Disk::Virtio, &SIZES, "");
    vm.start_nginx();
    let mut client = vm.client();
    for _ in 0..3 {
        client.fetch("/f1", &vm.files[1]);
        client.fetch("/f0", &vm.files[0]);
    }
    let work = vm.settled(3);
    let counts = (work.begun, work.returned, work.refused, work.broken);
    assert_eq!(counts, (3, 3, 0, 0), "{work:?}");
    assert!(work.bytes > 3 * 38 * MIB as u64, "{work:?}");
    let ls = stdout(&vm.daemon.ask(&["pipe", "ls"]));
    assert!(ls.contains("qp-send  yes"), "{ls}");
}

/// After QEMU's stop the guest may continue from an older snapshot, so the host resets transfers.
#[test]
#[ignore = "boots emulated PCs: make test-beds"]
fn qemus_stop_resets_transfers_at_once_and_the_guest_serves_again() {
    let vm = Vm::boot("qp-halt", Disk::Nvme, &SIZES, "rate = 10_000_000");
    vm.start_nginx();
    let mut client = vm.client();
    client.ask("/f1", "");
    assert_eq!(client.head().unwrap(), (200, 40 * MIB));
    let mut body = vec![0; 4 * MIB];
    client.0.read_exact(&mut body).unwrap();
    within(CHANGE_TIMEOUT, "the host has the connection", || {
        vm.work().transfers.len() == 1
    });
    vm.machine.qmp("stop", None).unwrap();
    let stopped = Instant::now();
    let error = client.0.read_to_end(&mut body).unwrap_err();
    let took = stopped.elapsed();
    println!("reset {took:?} after QEMU's answer to `stop`");
    assert_eq!(error.kind(), std::io::ErrorKind::ConnectionReset);
    assert!(body.len() < 40 * MIB && vm.files[1].starts_with(&body));
    // An allowance for other load on this machine.
    assert!(took < Duration::from_millis(100 + 400), "{took:?}");
    vm.counted(|work| work.broken == 1 && work.transfers.is_empty());
    vm.machine.qmp("cont", None).unwrap();
    let mut client = vm.client();
    client.fetch("/f0", &vm.files[0]);
    within(CHANGE_TIMEOUT, "the host serves again", || {
        let begun = vm.work().begun;
        client.fetch("/f1", &vm.files[1]);
        vm.work().begun > begun
    });
}
