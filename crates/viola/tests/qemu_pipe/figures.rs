// SPDX-License-Identifier: Apache-2.0
//! What copies cost an emulated guest, by itself and with the host's help. Images are in memory: a disk of this machine would be
//! flushed to on both sides, and be measured instead.

use std::time::Instant;

use crate::rig::MIB;
use crate::vm::{Disk, LIBRARY, Vm};

/// The files `f0` and `f1`; what a copy of none of their bytes takes is in each figure, too.
const SIZES: [usize; 2] = [64 * MIB, 256 * MIB];
const ROUNDS: usize = 5;

/// Seconds: of the clock, of the vCPU, of QEMU.
type Cost = [f64; 3];

/// CPU time of the vCPU's thread, and of all of QEMU's, in seconds.
fn cpu(vm: &Vm) -> [f64; 2] {
    let tasks = format!("/proc/{}/task", vm.machine.pid());
    let (mut vcpu, mut all) = (0.0, 0.0);
    for task in std::fs::read_dir(tasks).unwrap() {
        let task = task.unwrap().path();
        // a thread may end meanwhile
        let read = |file: &str| std::fs::read_to_string(task.join(file)).unwrap_or_default();
        let on = read("schedstat");
        let on = on.split(' ').next().unwrap().parse().unwrap_or(0.0) / 1e9;
        all += on;
        if read("comm").starts_with("CPU 0") {
            vcpu += on;
        }
    }
    [vcpu, all]
}

/// Copies a file that is in the guest's memory, and flushes the copy.
fn measure(vm: &Vm, library: &str, file: &str) -> Cost {
    vm.run(&format!("rm -f new; sync; cat {file} > /dev/null"));
    let (begun, before) = (Instant::now(), cpu(vm));
    vm.run(&format!("{library} /usr/bin/cp {file} new; sync -f new"));
    let (took, after) = (begun.elapsed().as_secs_f64(), cpu(vm));
    vm.sh(&format!("cmp /r/tmp/d/{file} /r/tmp/d/new"));
    [took, after[0] - before[0], after[1] - before[1]]
}

fn median(of: &[Cost]) -> Cost {
    std::array::from_fn(|what| {
        let mut values: Vec<f64> = of.iter().map(|cost| cost[what]).collect();
        values.sort_by(f64::total_cmp);
        values[values.len() / 2]
    })
}

/// Prints medians; the ratios of them, for each file.
fn compare(name: &str, disk: Disk) -> [Cost; 2] {
    let folder = tempfile::tempdir_in("/dev/shm").unwrap();
    let vm = Vm::boot_in(folder, name, disk, &SIZES, "");
    // programs are loaded
    for library in ["", LIBRARY] {
        measure(&vm, library, "f0");
    }
    let mut sides = [const { [const { Vec::new() }; 2] }; 2];
    for _ in 0..ROUNDS {
        for (file, sides) in ["f0", "f1"].iter().zip(&mut sides) {
            for (library, side) in ["", LIBRARY].iter().zip(sides) {
                side.push(measure(&vm, library, file));
            }
        }
    }
    let copies = 2 * ROUNDS as u64 + 1;
    let work = vm.settled(copies);
    let counts = (work.begun, work.returned, work.refused);
    assert_eq!(counts, (copies, copies, 0), "{work:?}");
    println!("cp and a flush, {disk:?}: seconds of the clock, the vCPU, QEMU");
    let ratios = std::array::from_fn(|file| {
        let [stock, viola] = [0, 1].map(|side| median(&sides[file][side]));
        let ratio = std::array::from_fn(|what| stock[what] / viola[what]);
        println!(
            "{} MiB: stock {stock:.3?} viola {viola:.3?} ratio {ratio:.2?}",
            SIZES[file] / MIB
        );
        ratio
    });
    let gib = (SIZES[0] * (ROUNDS + 1) + SIZES[1] * ROUNDS) as f64 / f64::from(1 << 30);
    println!(
        "the host: {:.3} s for each GiB",
        work.cpu_ms as f64 / 1e3 / gib
    );
    ratios
}

#[test]
#[ignore = "boots emulated PCs: make test-beds"]
fn a_copy_costs_a_third_at_most_where_the_disk_writes_zeros() {
    let [[_, small, _], [clock, vcpu, _]] = compare("qp-fig-n", Disk::Nvme);
    assert!(small >= 3.0 && vcpu >= 3.0 && clock >= 3.0);
}

#[test]
#[ignore = "boots emulated PCs: make test-beds"]
fn a_copy_costs_less_where_the_guest_writes_zeros() {
    let [[_, small, _], [clock, vcpu, _]] = compare("qp-fig-v", Disk::Virtio);
    assert!(small >= 2.0 && vcpu >= 2.0 && clock >= 1.5);
}
