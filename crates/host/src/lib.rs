// SPDX-License-Identifier: Apache-2.0
//! The VMs of this host: their threads, disks, NICs and control groups.
//!
//! | module | what it does |
//! |---|---|
//! | [`Inventory`] | finds the VMs and keeps them up to date |
//! | [`vm`] | the types that describe a VM |
//! | [`confirm`] | who vouches for a VM |
//! | [`qemu`], [`uml`], `microvm` | what each hypervisor shows of its VMs |
//! | [`libvirt`] | streams the events of libvirt's domains |
//! | [`sockets`], [`disk_files`] | open a VM's agent, monitors and images |
//! | [`monitor`], [`answer_process`] | the connections to emulators, whose answers processes without privilege read |
//! | [`attrs`] | changes the scheduling of one thread and restores it |
//! | [`cgroup`] | weight and quota of a VM's control group |
//! | [`counters`] | what a VM sent, received, read and wrote |
//! | [`facts`] | what this host is and allows |
//! | [`topology`], [`CpuSet`] | cores, sockets and NUMA nodes |
//! | [`proc`] | the files of procfs |
//!
//! Everything is read from procfs, sysfs, cgroupfs, the monitors of the hypervisors and libvirt. A process may end while
//! it is read. That is no error: functions return `None` or leave it out.

pub mod answer_process;
pub mod attrs;
pub mod cgroup;
pub mod confirm;
pub mod counters;
pub mod cpuset;
pub mod disk_files;
mod elf;
pub mod error;
pub mod facts;
#[cfg(any(test, feature = "fuzzing"))]
pub mod fuzzing;
mod held_nics;
pub mod inventory;
mod kernel;
pub mod libvirt;
mod microvm;
pub mod monitor;
mod netns;
mod paths;
mod pidfd;
pub mod prepared;
mod privilege;
pub mod proc;
pub mod qemu;
mod question;
pub mod replace;
pub mod sockets;
mod thread;
mod thread_cache;
pub mod topology;
pub mod uml;
pub mod unix_connect;
pub mod vm;
mod vm_threads;

pub use cpuset::CpuSet;
pub use error::HostError;
pub use inventory::Inventory;
pub use thread::{Thread, Tid};
pub use vm::{Disk, Hypervisor, Nic, NicKind, ServiceKind, ServiceThread, Vcpu, Vm, VmId};
