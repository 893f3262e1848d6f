// SPDX-License-Identifier: Apache-2.0
//! VMs on this host: their threads, disks and NICs, and what their cgroups say.
//!
//! [`Inventory`] finds the VMs, [`attrs`] changes the scheduling of one thread and puts it back,
//! [`counters`] reads what a VM sent, received, read and wrote, [`check`] tells what the host can do.
//!
//! Everything is read from procfs, sysfs, cgroupfs and, for QEMU, its QMP socket; [`libvirt`] tells of its VMs as things happen. A process that ends
//! while it is being looked at is an ordinary event: functions answer `None` or leave it out.

pub mod attrs;
pub mod cgroup;
pub mod check;
pub mod counters;
pub mod cpuset;
mod elf;
pub mod error;
#[cfg(any(test, feature = "fuzzing"))]
pub mod fuzzing;
pub mod inventory;
pub mod libvirt;
mod micro;
mod netns;
pub mod proc;
pub mod qemu;
pub mod reach;
mod tasks;
pub mod topology;
pub mod uml;
pub mod vm;

pub use cpuset::CpuSet;
pub use error::HostError;
pub use inventory::Inventory;
pub use vm::{Disk, Hypervisor, Nic, NicKind, Service, ServiceKind, Thread, Tid, Vcpu, Vm, VmId};
