// SPDX-License-Identifier: Apache-2.0
//! A VM as the host sees it: processes, threads, files and interfaces.

use std::fmt;
use std::path::PathBuf;
use std::sync::Arc;

use serde::{Deserialize, Serialize};

use crate::cgroup::Cgroup;
use crate::cpuset::CpuSet;
use crate::thread::{Thread, Tid};

/// The program that runs the VM.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Hypervisor {
    /// User Mode Linux: the guest's kernel is a host process.
    Uml,
    /// QEMU, with KVM or TCG.
    Qemu,
    /// Firecracker.
    Firecracker,
    /// Cloud Hypervisor.
    #[serde(rename = "cloud-hypervisor")]
    CloudHypervisor,
}

impl fmt::Display for Hypervisor {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Uml => "uml",
            Self::Qemu => "qemu",
            Self::Firecracker => "firecracker",
            Self::CloudHypervisor => "cloud-hypervisor",
        })
    }
}

/// `uml:NAME` or `qemu:NAME`; unique among the VMs that run now, and the same for as long as a VM lives.
///
/// When a second VM of the same hypervisor has the same name, it is called `qemu:NAME@PID`. A copy is cheap: every
/// snapshot has one of each.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(transparent)]
pub struct VmId(Arc<str>);

impl VmId {
    /// The identity of the first VM with this name.
    #[must_use]
    pub fn new(hypervisor: Hypervisor, name: &str) -> Self {
        Self(format!("{hypervisor}:{name}").into())
    }

    /// The identity of a further VM with this name.
    #[must_use]
    pub(crate) fn with_pid(hypervisor: Hypervisor, name: &str, pid: Tid) -> Self {
        Self(format!("{hypervisor}:{name}@{pid}").into())
    }

    /// The text form.
    #[must_use]
    pub fn as_str(&self) -> &str {
        &self.0
    }
}

impl fmt::Display for VmId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

/// A virtual CPU and the host threads that carry it.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Vcpu {
    /// Number in the guest, from 0.
    pub index: u32,
    /// The threads whose run time is this vCPU's run time; only one of them runs at any moment.
    ///
    /// QEMU: one thread. It is empty when one thread serves several vCPUs (TCG with `thread=single`):
    /// the thread is then listed with the lowest of them.
    /// UML: the main thread first, then the host process of every guest address space.
    pub threads: Vec<Thread>,
    /// UML: the thread that is the guest's kernel, always the first of `threads`. The kernel hands the
    /// vCPU to a guest process and takes it back, so when the threads of a vCPU get real-time
    /// priorities this one has to rank one above the others; otherwise a busy guest process keeps the
    /// guest's own interrupts out.
    pub kernel_thread: Option<Tid>,
    /// CPUs that the first thread may run on.
    pub cores: CpuSet,
}

/// What a host thread does for a VM beside running its vCPUs.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum ServiceKind {
    /// In-kernel virtio back-end (`vhost-PID`): network packets pass through it.
    Vhost,
    /// QEMU's main loop: device emulation and monitor.
    Emulator,
    /// Thread that carries out disk I/O: a QEMU iothread, or UML's block driver helper.
    Iothread,
    /// Anything else: worker pool, RCU, signal helper.
    Helper,
    /// Of another process that carries a device of the VM (see [`crate::Inventory::set_backends`]).
    Backend,
}

/// A host thread that works for the VM and is not a vCPU.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct ServiceThread {
    /// The thread.
    pub thread: Thread,
    /// What it does.
    pub kind: ServiceKind,
}

/// A disk of the VM that is a file or device of the host.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Disk {
    /// The image, as the hypervisor names it (relative names are completed with its working directory).
    pub path: PathBuf,
    /// UML: the guest's name (`ubda`). QEMU: device or node name.
    pub device: String,
    /// Whether the guest may only read it.
    pub read_only: bool,
    /// Image format as the hypervisor was told or reports it (`raw`, `qcow2`, `cow`); never probed.
    pub format: Option<String>,
}

/// How a NIC is attached to the host; tells in which direction the host's counters count.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum NicKind {
    /// Tap device: what the host receives from it, the guest has sent.
    Tap,
    /// Macvtap: what the host receives on it goes to the guest.
    Macvtap,
    /// Packet socket on an interface of the host: what arrives there goes to the guest.
    Raw,
}

/// A network interface of the VM that is an interface of the host.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Nic {
    /// Name of the host's interface.
    pub tap: String,
    /// How it is attached.
    pub kind: NicKind,
    /// The guest's MAC address, when the hypervisor was told one.
    pub mac: Option<String>,
    /// Inode number of the network namespace that the VM's process is in (`/proc/PID/ns/net`).
    pub netns: u64,
    /// Number of the host's interface in that namespace; `None` when the interface is not there (yet)
    /// or the namespace may not be entered.
    pub ifindex: Option<u32>,
}

/// One running VM.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Vm {
    /// Stable name for the operator and for tables.
    pub id: VmId,
    /// Name that the hypervisor was given; `pid-N` when none. Control characters are replaced.
    pub name: String,
    /// The program that runs it.
    pub hypervisor: Hypervisor,
    /// Its main process.
    pub pid: Tid,
    /// Start time of `pid` in clock ticks after boot, so that a reused number is noticed.
    pub start_time: u64,
    /// Virtual CPUs, by index. Empty when QEMU's vCPU threads cannot be told from its others; a
    /// warning of the inventory then says what to do.
    pub vcpus: Vec<Vcpu>,
    /// Threads that work for the VM beside its vCPUs.
    pub service: Vec<ServiceThread>,
    /// Disks with a file of the host behind them.
    pub disks: Vec<Disk>,
    /// NICs with an interface of the host behind them.
    pub nics: Vec<Nic>,
    /// The CPU control group of the VM and what it allows.
    pub cgroup: Option<Cgroup>,
    /// CPUs that any of its vCPUs may run on.
    pub cores: CpuSet,
    /// QEMU's run state as QMP names it (`running`, `paused`...), or libvirt's; `None` when neither was asked.
    pub status: Option<String>,
    /// What QEMU was told by `-uuid`.
    #[serde(default)]
    pub uuid: Option<String>,
    /// Whether libvirt says that it is one of its domains.
    #[serde(default)]
    pub libvirt: bool,
}

impl Vm {
    /// All host threads of the VM, vCPUs first.
    pub fn threads(&self) -> impl Iterator<Item = &Thread> {
        self.vcpus
            .iter()
            .flat_map(|v| &v.threads)
            .chain(self.service.iter().map(|s| &s.thread))
    }

    /// All host processes of the VM, the main one first. UML guests have one per guest address space.
    #[must_use]
    pub fn processes(&self) -> Vec<Tid> {
        let mut pids = vec![self.pid];
        for thread in self.threads() {
            // A kernel thread (vhost before Linux 6.4) is a process of its own, with nothing to read.
            if !pids.contains(&thread.pid) {
                pids.push(thread.pid);
            }
        }
        pids
    }
}

/// A name from outside made fit for one line of text: control characters become U+FFFD.
pub(crate) fn printable(name: &str) -> String {
    name.chars()
        .map(|c| {
            if c.is_control() {
                char::REPLACEMENT_CHARACTER
            } else {
                c
            }
        })
        .collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_id_is_the_hypervisor_and_the_name() {
        assert_eq!(VmId::new(Hypervisor::Uml, "g1").to_string(), "uml:g1");
        assert_eq!(
            VmId::with_pid(Hypervisor::Qemu, "web", 7).as_str(),
            "qemu:web@7"
        );
    }

    #[test]
    fn a_name_cannot_write_to_the_operators_terminal() {
        assert_eq!(printable("a\x1b[2Jb\n"), "a\u{fffd}[2Jb\u{fffd}");
    }
}
