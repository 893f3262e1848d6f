// SPDX-License-Identifier: Apache-2.0
//! Files that `cp` copies by `copy_file_range` and the host by its own, on both kinds of disks.

use crate::rig::MIB;
use crate::vm::{Disk, LIBRARY, Vm};

const SIZES: [usize; 2] = [MIB, 40 * MIB];

/// Copies, compares, and looks at the disk; bytes that the guest has written to it.
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
fn a_disk_that_writes_zeros_by_itself_has_none_written_to_it() {
    let written = copied("qp-nvme", Disk::Nvme);
    println!("the guest has written {written} bytes");
    assert!(written < 8 * MIB as u64, "{written}");
}

#[test]
#[ignore = "boots emulated PCs: make test-beds"]
fn a_disk_that_does_not_has_zeros_written_to_it() {
    let written = copied("qp-virt", Disk::Virtio);
    println!("the guest has written {written} bytes");
    assert!(written >= 80 * MIB as u64, "{written}");
}
