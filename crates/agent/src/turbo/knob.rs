// SPDX-License-Identifier: Apache-2.0
//! What can be set in a guest, and one change of it.

use std::fmt;

use serde::{Deserialize, Serialize};

use super::cpus::Cpus;
use super::snapshot::{Snapshot, numbers};

/// Name of the agent's own cgroup below the root.
pub const TURBO_GROUP: &str = "viola.turbo";
/// Values of [`Knob::Controller`].
pub const OFF: &str = "off";
/// See [`OFF`].
pub const ON: &str = "on";
/// Value of [`Knob::Group`]: it is not there.
pub const ABSENT: &str = "absent";
/// See [`ABSENT`].
pub const THERE: &str = "there";
/// Value of [`Knob::Partition`] in a new group.
pub const MEMBER: &str = "member";

/// A setting of the guest. A value is text, in the one form that [`Snapshot::get`] returns.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Knob {
    /// Interrupts that irqbalance, process `pid`, leaves alone: numbers.
    Irqbalance {
        /// Its process.
        pid: i32,
    },
    /// Affinity of an interrupt: a list of CPUs.
    Irq {
        /// Its number.
        irq: u32,
    },
    /// RPS of a receive queue: a list of CPUs.
    Rps {
        /// Name of the interface.
        nic: String,
        /// Number of the queue.
        queue: usize,
    },
    /// RFS of a receive queue: a number of flows.
    Rfs {
        /// Name of the interface.
        nic: String,
        /// Number of the queue.
        queue: usize,
    },
    /// XPS of a transmit queue: a list of CPUs.
    Xps {
        /// Name of the interface.
        nic: String,
        /// Number of the queue.
        queue: usize,
    },
    /// `rq_affinity` of a disk: 0 completes a request where its interrupt arrives, 1 or 2 where it was made.
    Completion {
        /// Name of the disk.
        disk: String,
    },
    /// CPUs of unbound workqueues: a list.
    Workqueues,
    /// Whether the root enables cpusets for the groups below: [`ON`] or [`OFF`].
    Controller,
    /// The agent's own group: [`THERE`] or [`ABSENT`].
    Group,
    /// CPUs of the agent's own group: a list.
    GroupCpus,
    /// Partition type of the agent's own group.
    Partition,
    /// `cpuset.cpus` of another group below the root: a list of CPUs, empty for all.
    Slice {
        /// Name of the group.
        name: String,
    },
    /// cgroup and affinity of a kernel thread: a path and a list of CPUs.
    Member {
        /// The thread.
        tid: i32,
    },
    /// Affinity of a thread: a list of CPUs.
    Thread {
        /// The thread.
        tid: i32,
    },
    /// A setting below `/proc/sys`.
    Sysctl {
        /// Its path there.
        name: String,
    },
}

/// Groups of settings in a report.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Part {
    /// Interrupts, and irqbalance.
    Interrupts,
    /// RPS, RFS and XPS.
    Queues,
    /// Completion of disk requests.
    Disks,
    /// Unbound workqueues.
    Workqueues,
    /// Kernel threads.
    Threads,
    /// Programs.
    Applications,
    /// Receive buffers.
    Buffers,
}

impl Part {
    /// The name in the report.
    pub fn word(self) -> &'static str {
        match self {
            Self::Interrupts => "interrupts",
            Self::Queues => "queues",
            Self::Disks => "disks",
            Self::Workqueues => "workqueues",
            Self::Threads => "threads",
            Self::Applications => "applications",
            Self::Buffers => "buffers",
        }
    }
}

/// One change.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Step {
    /// What is set.
    pub knob: Knob,
    /// Its group in the report.
    pub part: Part,
    /// The object's identity, which distinguishes it from a later one of the same number or name.
    pub identity: String,
    /// The old value.
    pub old: String,
    /// The new value.
    pub new: String,
    /// Whether later steps of its part depend on it.
    pub chain: bool,
}

impl fmt::Display for Knob {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Irqbalance { pid } => write!(f, "interrupts banned in irqbalance ({pid})"),
            Self::Irq { irq } => write!(f, "interrupt {irq}"),
            Self::Rps { nic, queue } => write!(f, "RPS of {nic} rx-{queue}"),
            Self::Rfs { nic, queue } => write!(f, "RFS of {nic} rx-{queue}"),
            Self::Xps { nic, queue } => write!(f, "XPS of {nic} tx-{queue}"),
            Self::Completion { disk } => write!(f, "rq_affinity of {disk}"),
            Self::Workqueues => write!(f, "unbound workqueues"),
            Self::Controller => write!(f, "cpuset in the root cgroup's subtree_control"),
            Self::Group => write!(f, "cgroup {TURBO_GROUP}"),
            Self::GroupCpus => write!(f, "cpuset.cpus of {TURBO_GROUP}"),
            Self::Partition => write!(f, "partition {TURBO_GROUP}"),
            Self::Slice { name } => write!(f, "cpuset.cpus of {name}"),
            Self::Member { tid } => write!(f, "cgroup of thread {tid}"),
            Self::Thread { tid } => write!(f, "CPUs of thread {tid}"),
            Self::Sysctl { name } => write!(f, "{}", name.replace('/', ".")),
        }
    }
}

impl Snapshot {
    /// The value of a setting; `None` when its object does not exist.
    pub fn get(&self, knob: &Knob) -> Option<String> {
        let cgroup = self.cgroup.as_ref();
        let ours = cgroup.and_then(|c| c.turbo_group.as_ref());
        let list = |cpus: &Cpus| cpus.to_string();
        match knob {
            Knob::Irqbalance { pid } => {
                let daemon = self.irqbalance.as_ref().filter(|d| d.pid == *pid)?;
                daemon.banned.as_ref().map(numbers)
            }
            Knob::Irq { irq } => self.irqs.get(irq).map(|irq| list(&irq.cpus)),
            Knob::Rps { nic, queue } => self.nics.get(nic)?.rps.get(*queue).map(list),
            Knob::Rfs { nic, queue } => self.nics.get(nic)?.rfs.get(*queue).map(u32::to_string),
            Knob::Xps { nic, queue } => self.nics.get(nic)?.xps.get(*queue).map(list),
            Knob::Completion { disk } => self.disks.get(disk).cloned(),
            Knob::Workqueues => self.workqueues.as_ref().map(list),
            Knob::Controller => cgroup.map(|c| if c.enabled { ON } else { OFF }.to_owned()),
            Knob::Group => {
                cgroup.map(|c| c.turbo_group.as_ref().map_or(ABSENT, |_| THERE).to_owned())
            }
            Knob::GroupCpus => ours.map(|o| o.cpus.clone()),
            Knob::Partition => ours.map(|o| o.partition.clone()),
            Knob::Slice { name } => cgroup?.slices.get(name).cloned(),
            Knob::Member { tid } => {
                let task = self.tasks.get(tid)?;
                Some(format!("{} {}", task.cgroup, task.cpus))
            }
            Knob::Thread { tid } => self.tasks.get(tid).map(|task| list(&task.cpus)),
            Knob::Sysctl { name } => self.sysctls.get(name).cloned(),
        }
    }

    /// The identity of a setting's object, which distinguishes it from a later one of the same number or name.
    pub fn identity(&self, knob: &Knob) -> Option<String> {
        match knob {
            // irqbalance may be busy and not answer
            Knob::Irqbalance { pid } => {
                let daemon = self.irqbalance.as_ref().filter(|d| d.pid == *pid);
                daemon.map(|_| String::new())
            }
            Knob::Irq { irq } => self.irqs.get(irq).map(|irq| irq.actions.join(",")),
            Knob::Rps { nic, .. } | Knob::Rfs { nic, .. } | Knob::Xps { nic, .. } => {
                self.nics.get(nic).map(|nic| nic.index.to_string())
            }
            Knob::Member { tid } | Knob::Thread { tid } => {
                self.tasks.get(tid).map(|task| task.start.to_string())
            }
            _ => self.get(knob).map(|_| String::new()),
        }
    }
}
