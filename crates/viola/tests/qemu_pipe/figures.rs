// SPDX-License-Identifier: Apache-2.0
//! What copies cost an emulated guest, by itself and with the host's help.

use std::time::Instant;

use crate::rig::MIB;
use crate::vm::{Disk, LIBRARY, Vm};

const SIZE: usize = 64 * MIB;
const ROUNDS: usize = 5;

/// Seconds: of the clock, of the vCPU, of QEMU.
type Cost = [f64; 3];

/// CPU time of the vCPU's thread, and of all of QEMU's, in seconds.
fn cpu(vm: &Vm) -> [f64; 2] {
    let tasks = format!("/proc/{}/task", vm.machine.pid());
    let (mut vcpu, mut all) = (0.0, 0.0);
    for task in std::fs::read_dir(tasks).unwrap() {
        let task = task.unwrap().path();
        let read = |file: &str| std::fs::read_to_string(task.join(file)).unwrap_or_default();
        let stat = read("schedstat");
        let on: f64 = stat.split(' ').next().unwrap().parse().unwrap_or(0.0);
        all += on / 1e9;
        if read("comm").starts_with("CPU 0") {
            vcpu += on / 1e9;
        }
    }
    [vcpu, all]
}

fn measure(vm: &Vm, library: &str) -> Cost {
    vm.run("rm -f new; sync");
    let (begun, before) = (Instant::now(), cpu(vm));
    vm.run(&format!("{library} /usr/bin/cp f0 new; sync -f new"));
    let (took, after) = (begun.elapsed().as_secs_f64(), cpu(vm));
    vm.sh("cmp /r/tmp/d/f0 /r/tmp/d/new");
    [took, after[0] - before[0], after[1] - before[1]]
}

fn median(of: &[Cost]) -> Cost {
    std::array::from_fn(|what| {
        let mut values: Vec<f64> = of.iter().map(|cost| cost[what]).collect();
        values.sort_by(f64::total_cmp);
        values[values.len() / 2]
    })
}

/// Prints medians; the ratio of them.
fn compare(name: &str, disk: Disk) -> Cost {
    let vm = Vm::boot(name, disk, &[SIZE], "");
    // the file in the guest's memory, programs loaded
    measure(&vm, "");
    measure(&vm, LIBRARY);
    let mut sides = [Vec::new(), Vec::new()];
    for _ in 0..ROUNDS {
        for (side, library) in sides.iter_mut().zip(["", LIBRARY]) {
            side.push(measure(&vm, library));
        }
    }
    let work = vm.settled(1);
    assert_eq!(
        (work.begun, work.broken, work.refused),
        (ROUNDS as u64 + 1, 0, 0),
        "{work:?}"
    );
    let [stock, viola] = sides.map(|side| median(&side));
    println!("cp of {} MiB and a flush, {disk:?}, seconds:", SIZE / MIB);
    println!("        clock   vCPU   QEMU");
    for (name, [clock, vcpu, qemu]) in [("stock", stock), ("viola", viola)] {
        println!("{name}  {clock:6.3} {vcpu:6.3} {qemu:6.3}");
    }
    let ratio = std::array::from_fn(|what| stock[what] / viola[what]);
    println!("ratio  {:6.2} {:6.2} {:6.2}", ratio[0], ratio[1], ratio[2]);
    println!("the host's worker: {} ms in all", work.cpu_ms);
    ratio
}

#[test]
#[ignore = "boots emulated PCs: make test-beds"]
fn a_copy_costs_a_third_at_most_where_the_disk_writes_zeros() {
    let [clock, vcpu, _] = compare("qp-fig-n", Disk::Nvme);
    assert!(clock >= 3.0 && vcpu >= 3.0, "{clock} {vcpu}");
}

#[test]
#[ignore = "boots emulated PCs: make test-beds"]
fn a_copy_costs_less_where_the_guest_writes_zeros() {
    let [clock, vcpu, _] = compare("qp-fig-v", Disk::Virtio);
    assert!(clock >= 1.0 && vcpu >= 1.0, "{clock} {vcpu}");
}
