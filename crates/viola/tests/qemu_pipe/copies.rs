// SPDX-License-Identifier: Apache-2.0
//! The host writes what `cp` copies with `copy_file_range` and what clients upload, to both kinds of disks.

use std::io::{Read, Write};

use crate::rig::MIB;
use crate::vm::{CHANGE_TIMEOUT, Disk, LIBRARY, Vm, connect};

const SIZES: [usize; 2] = [MIB, 40 * MIB];

/// Copies a file, compares the copy, and checks the disk. Returns the bytes that the guest itself has written to it.
fn copied(name: &str, disk: Disk) -> u64 {
    let vm = Vm::boot(name, disk, &SIZES, "");
    let before = vm.written();
    let cp = format!("{LIBRARY} /usr/bin/cp");
    vm.run(&format!("{cp} f1 new; {cp} f0 f1.part; {cp} f1 new"));
    let same = "cmp /r/tmp/d/f1 /r/tmp/d/new && cmp /r/tmp/d/f0 /r/tmp/d/f1.part";
    vm.sh(same);
    vm.sh("sync; echo 3 > /proc/sys/vm/drop_caches");
    vm.sh(same);
    let work = vm.settled(2);
    let counts = (work.begun, work.refused, work.broken);
    assert_eq!(counts, (2, 0, 0), "{work:?}");
    assert!(work.bytes >= 80 * MIB as u64, "{work:?}");
    let written = vm.written() - before;
    vm.check_disk();
    vm.sh(same);
    written
}

#[test]
#[ignore = "boots emulated PCs: make test-beds"]
fn a_disk_that_writes_zeros_by_itself_gets_none_from_the_guest() {
    let written = copied("qp-nvme", Disk::Nvme);
    println!("the guest has written {written} bytes");
    assert!(written < 8 * MIB as u64, "{written}");
}

#[test]
#[ignore = "boots emulated PCs: make test-beds"]
fn another_disk_gets_zeros_from_the_guest() {
    let written = copied("qp-virt", Disk::Virtio);
    println!("the guest has written {written} bytes");
    assert!(written >= 80 * MIB as u64, "{written}");
}

#[test]
#[ignore = "boots emulated PCs: make test-beds"]
fn the_host_writes_what_a_client_sends() {
    const PORT: u16 = 90;
    let vm = Vm::boot("qp-up", Disk::Nvme, &SIZES, "");
    let before = vm.written();
    vm.run(&format!(
        "mkdir in; VIOLA_PIPE_SOCKET=/tmp/n/pipe.sock vpipe-upload in 0.0.0.0 {PORT} > /tmp/n/up &"
    ));
    vm.wait_listening(PORT);
    let mut client = connect(PORT).unwrap();
    client.set_read_timeout(Some(CHANGE_TIMEOUT)).unwrap();
    for _ in 0..2 {
        for file in [&vm.files[1], &vm.files[0]] {
            let head = (file.len() as u64).to_be_bytes();
            client.write_all(&head).unwrap();
            client.write_all(file).unwrap();
            let mut answer = [0; 8];
            client.read_exact(&mut answer).unwrap();
            assert_eq!(answer, head);
        }
    }
    let work = vm.settled(2);
    let counts = (work.begun, work.returned, work.refused);
    assert_eq!(counts, (2, 2, 0), "{work:?}");
    // The emulated guest receives the bytes that arrive before the host has the connection.
    let written = vm.written() - before;
    let moved = work.bytes;
    println!("the host has moved {moved} bytes, the guest has written {written}");
    assert!(moved > 40 * MIB as u64 && written + moved < 86 * MIB as u64);
    let same = "cd /r/tmp/d/in && cmp 1 ../f1 && cmp 2 ../f0 && cmp 3 ../f1 && cmp 4 ../f0";
    vm.sh(same);
    vm.sh(&format!("sync; echo 3 > /proc/sys/vm/drop_caches; {same}"));
    vm.run("killall vpipe-upload");
    vm.check_disk();
    vm.sh(same);
}
