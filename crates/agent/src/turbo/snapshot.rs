// SPDX-License-Identifier: Apache-2.0
//! What of the guest is looked at: everything that the planner may know.

use std::collections::{BTreeMap, BTreeSet};

use super::cpus::Cpus;

/// The guest at one moment.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Snapshot {
    /// CPUs that run.
    pub online: Cpus,
    /// CPUs that this kernel could ever have.
    pub possible: Cpus,
    /// Interrupts, by number.
    pub irqs: BTreeMap<u32, Irq>,
    /// Network interfaces with a device behind them, by name.
    pub nics: BTreeMap<String, Nic>,
    /// `rq_affinity` of the disks with a device behind them, by name.
    pub disks: BTreeMap<String, String>,
    /// Kinds of the virtio devices (virtio 1.2, section 5), by name (`virtio0`).
    pub virtio: BTreeMap<String, u32>,
    /// CPUs of workqueues that are bound to none.
    pub workqueues: Option<Cpus>,
    /// Threads of the kernel, and where applications have to be moved one by one, all others.
    pub tasks: BTreeMap<i32, Task>,
    /// The whole hierarchy of cgroup v2, where its controller of CPUs can be had.
    pub cgroup: Option<Cgroup>,
    /// The daemon that moves interrupts about, if it runs.
    pub irqbalance: Option<Irqbalance>,
    /// Settings below `/proc/sys`, by path, words separated by one blank.
    pub sysctls: BTreeMap<String, String>,
    /// Memory in bytes.
    pub memory: u64,
}

/// An interrupt.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Irq {
    /// Names that its handlers gave.
    pub actions: Vec<String>,
    /// Class of the PCI device that it is of (base class, subclass, interface).
    pub class: Option<u32>,
    /// Path of that device below `/sys/devices`.
    pub device: Option<String>,
    /// Where it may come.
    pub cpus: Cpus,
    /// Where it does come, on kernels that tell.
    pub effective: Option<Cpus>,
    /// CPUs that it has ever come to.
    pub seen: Cpus,
    /// Whether its file can be written to at all; kernels of before 6.11 say so of all.
    pub settable: bool,
}

/// A network interface.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Nic {
    /// Its number, which tells it from a later one of the same name.
    pub index: u32,
    /// Path of its device below `/sys/devices`.
    pub device: String,
    /// Megabits a second, where it says so.
    pub mbit: Option<u32>,
    /// CPUs that its receive queues pass packets on to (RPS); none: they stay.
    pub rps: Vec<Cpus>,
    /// Flows that each receive queue follows to their program's CPU (RFS).
    pub rfs: Vec<u32>,
    /// CPUs that send by each transmit queue (XPS); empty where there is one queue.
    pub xps: Vec<Cpus>,
}

/// A thread.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Task {
    /// Its process.
    pub pid: i32,
    /// The process that its process is a child of.
    pub parent: i32,
    /// When it was started, in the kernel's ticks: tells it from a later one of the same number.
    pub start: u64,
    /// Its name.
    pub name: String,
    /// Whether it is the kernel's.
    pub kernel: bool,
    /// Whether the kernel lets nobody set its CPUs (`PF_NO_SETAFFINITY`).
    pub fixed: bool,
    /// Where it may run.
    pub cpus: Cpus,
    /// Its cgroup v2.
    pub cgroup: String,
}

/// cgroup v2, as far as it is about CPUs.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Cgroup {
    /// Whether the root gives the controller to the groups below.
    pub enabled: bool,
    /// viola's own group, while it is there.
    pub turbo_group: Option<TurboGroup>,
    /// The other groups below the root, with their `cpuset.cpus`.
    pub slices: BTreeMap<String, String>,
}

/// viola's own group.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct TurboGroup {
    /// `cpuset.cpus`
    pub cpus: String,
    /// `cpuset.cpus.partition`
    pub partition: String,
}

/// irqbalance.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Irqbalance {
    /// Its process.
    pub pid: i32,
    /// The interrupts that it leaves alone; `None` when it does not answer at its socket.
    pub banned: Option<BTreeSet<u32>>,
}

/// Numbers as they stand in journals, separated by blanks.
pub fn numbers(set: &BTreeSet<u32>) -> String {
    let words: Vec<String> = set.iter().map(u32::to_string).collect();
    words.join(" ")
}
