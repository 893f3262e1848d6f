// SPDX-License-Identifier: Apache-2.0
//! The state of the guest: everything that the planner knows.

use std::collections::{BTreeMap, BTreeSet};

use super::cpus::Cpus;

/// The guest at one moment.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Snapshot {
    /// Online CPUs.
    pub online: Cpus,
    /// Possible CPUs.
    pub possible: Cpus,
    /// Interrupts by number.
    pub irqs: BTreeMap<u32, Irq>,
    /// Network interfaces with a device, by name.
    pub nics: BTreeMap<String, Nic>,
    /// `rq_affinity` of the disks with a device, by name.
    pub disks: BTreeMap<String, String>,
    /// Device type of the virtio devices (virtio 1.2, section 5), by name (`virtio0`).
    pub virtio: BTreeMap<String, u32>,
    /// CPUs of unbound workqueues.
    pub workqueues: Option<Cpus>,
    /// Kernel threads that do I/O; all other threads too when applications are moved one by one.
    pub tasks: BTreeMap<i32, Task>,
    /// The cgroup v2 hierarchy, if it has the cpuset controller.
    pub cgroup: Option<Cgroup>,
    /// irqbalance, if it runs.
    pub irqbalance: Option<Irqbalance>,
    /// Settings below `/proc/sys` by path, words separated by one blank.
    pub sysctls: BTreeMap<String, String>,
    /// Memory in bytes.
    pub memory: u64,
}

/// An interrupt.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Irq {
    /// Names of its handlers.
    pub actions: Vec<String>,
    /// Class of its PCI device (base class, subclass, interface).
    pub class: Option<u32>,
    /// Path of that device below `/sys/devices`.
    pub device: Option<String>,
    /// CPUs that it may arrive at.
    pub cpus: Cpus,
    /// CPUs that it arrives at, on kernels that report them.
    pub effective: Option<Cpus>,
    /// CPUs that it has ever arrived at.
    pub seen: Cpus,
    /// Whether its affinity file is writable; kernels before 6.11 say so of all.
    pub settable: bool,
}

/// A network interface.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Nic {
    /// Interface index, which distinguishes it from a later one of the same name.
    pub index: u32,
    /// Path of its device below `/sys/devices`.
    pub device: String,
    /// Speed in megabits per second, if it is known.
    pub mbit: Option<u32>,
    /// RPS: CPUs of each receive queue; an empty set: off.
    pub rps: Vec<Cpus>,
    /// RFS: number of flows of each receive queue.
    pub rfs: Vec<u32>,
    /// XPS: CPUs of each transmit queue; empty with a single queue.
    pub xps: Vec<Cpus>,
}

/// A thread.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Task {
    /// Its process id.
    pub pid: i32,
    /// Parent of its process.
    pub parent: i32,
    /// Start time in kernel ticks, which distinguishes it from a later one of the same id.
    pub start: u64,
    /// Its name.
    pub name: String,
    /// Whether it is a kernel thread.
    pub kernel: bool,
    /// Whether the kernel forbids to set its CPUs (`PF_NO_SETAFFINITY`).
    pub fixed: bool,
    /// Its affinity.
    pub cpus: Cpus,
    /// Its cgroup v2.
    pub cgroup: String,
}

/// The cpuset part of cgroup v2.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Cgroup {
    /// Whether the root enables the controller for the groups below.
    pub enabled: bool,
    /// The agent's own group, if it exists.
    pub turbo_group: Option<TurboGroup>,
    /// The other groups below the root, with their `cpuset.cpus`.
    pub slices: BTreeMap<String, String>,
}

/// The agent's own group.
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
    /// Its process id.
    pub pid: i32,
    /// Interrupts that it leaves alone; `None` when it does not answer.
    pub banned: Option<BTreeSet<u32>>,
}

/// Formats numbers as in the journal, separated by blanks.
pub fn numbers(set: &BTreeSet<u32>) -> String {
    let words: Vec<String> = set.iter().map(u32::to_string).collect();
    words.join(" ")
}
