// SPDX-License-Identifier: Apache-2.0
//! The types that describe a VM as the host sees it.

use std::fmt;
use std::path::PathBuf;
use std::sync::Arc;

use serde::{Deserialize, Serialize};

use crate::cgroup::Cgroup;
use crate::confirm::Confirmation;
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

/// `HYPERVISOR:NAME`, for example `qemu:db01`: unique among the running VMs, and constant while a
/// VM runs. A second VM of the same hypervisor and name is `qemu:db01@PID`. Cloning is cheap.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(transparent)]
pub struct VmId(Arc<str>);

impl VmId {
    /// The identity of the first VM of this name.
    #[must_use]
    pub fn new(hypervisor: Hypervisor, name: &str) -> Self {
        Self(format!("{hypervisor}:{name}").into())
    }

    /// The identity of a further VM of this name.
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

/// A virtual CPU and the host threads that run it.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Vcpu {
    /// Number in the guest, from 0.
    pub index: u32,
    /// The threads whose run time is the vCPU's run time; only one of them runs at a time.
    ///
    /// QEMU: one thread. Empty when one thread serves several vCPUs (TCG with `thread=single`): the lowest vCPU has it then.
    /// UML: the kernel thread first, then the host process of every guest address space.
    pub threads: Vec<Thread>,
    /// UML: the thread that is the guest's kernel, the first of `threads`. It passes the vCPU to guest processes and takes it
    /// back. With real-time priorities it must rank one above the others; otherwise a busy guest process blocks the guest's
    /// interrupts.
    pub kernel_thread: Option<Tid>,
    /// CPUs that the first thread may run on.
    pub cores: CpuSet,
}

/// What a host thread does for a VM besides running its vCPUs.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum ServiceKind {
    /// In-kernel virtio back end (`vhost-PID`), which passes network packets.
    Vhost,
    /// QEMU's main loop: device emulation and monitor.
    Emulator,
    /// Disk I/O: a QEMU iothread, or UML's block driver helper.
    Iothread,
    /// Any other thread: worker pool, RCU, signal helper.
    Helper,
    /// A thread of another process that serves a device of the VM ([`crate::Inventory::set_backends`]).
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
    /// The image as the hypervisor names it; relative names are completed with its working directory.
    pub path: PathBuf,
    /// UML: the guest's name (`ubda`). QEMU: device or node name. Others: the drive's id.
    pub device: String,
    /// Whether the guest has it read-only.
    pub read_only: bool,
    /// Image format that the hypervisor was given or reports (`raw`, `qcow2`, `cow`); viola never probes it.
    pub format: Option<String>,
}

/// How a NIC is attached to the host; decides the direction of the host's counters.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum NicKind {
    /// Tap device: the guest sends what the host receives on it.
    Tap,
    /// Macvtap: what the host receives on it goes to the guest.
    Macvtap,
    /// Packet socket on a host interface: what the host receives there goes to the guest.
    Raw,
}

/// A network interface of the VM that is an interface of the host.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Nic {
    /// Name of the host's interface.
    pub tap: String,
    /// How it is attached.
    pub kind: NicKind,
    /// The guest's MAC address, when the hypervisor was given one.
    pub mac: Option<String>,
    /// Inode number of the network namespace that the VM's process is in (`/proc/PID/ns/net`).
    pub netns: u64,
    /// Number of the host's interface in that namespace; `None` while the interface does not exist or this program may not enter
    /// the namespace.
    pub ifindex: Option<u32>,
}

/// One running VM.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Vm {
    /// Stable name for the operator and for tables.
    pub id: VmId,
    /// Name that the hypervisor was given, else `pid-N`. Control characters are replaced.
    pub name: String,
    /// The program that runs the VM.
    pub hypervisor: Hypervisor,
    /// Main process.
    pub pid: Tid,
    /// Start time of `pid` in clock ticks after boot; identifies the VM when the number is reused.
    pub start_time: u64,
    /// Virtual CPUs, by index. Empty when QEMU's vCPU threads cannot be identified; a warning of the inventory then gives the
    /// remedy.
    pub vcpus: Vec<Vcpu>,
    /// Service threads: those that work for the VM besides its vCPUs.
    pub service: Vec<ServiceThread>,
    /// Disks with a file of the host behind them.
    pub disks: Vec<Disk>,
    /// NICs whose interface of the host the VM's process holds.
    pub nics: Vec<Nic>,
    /// The CPU control group of the VM and what it allows.
    pub cgroup: Option<Cgroup>,
    /// CPUs that any of its vCPUs may run on.
    pub cores: CpuSet,
    /// Run state (`running`, `paused`...) from QMP, the hypervisor's HTTP interface or libvirt;
    /// `None` when none of them has answered.
    pub status: Option<String>,
    /// QEMU's `-uuid`.
    #[serde(default)]
    pub uuid: Option<String>,
    /// Whether it is a domain of libvirt.
    #[serde(default)]
    pub libvirt: bool,
    /// Who confirms that the process is this VM. `None`: only the process itself says so, and it gets nothing.
    #[serde(default)]
    pub confirmed: Option<Confirmation>,
}

impl Vm {
    /// All host threads of the VM, vCPUs first.
    pub fn threads(&self) -> impl Iterator<Item = &Thread> {
        self.vcpus
            .iter()
            .flat_map(|v| &v.threads)
            .chain(self.service.iter().map(|s| &s.thread))
    }
}

/// Makes a name from outside fit for one line of text: control characters become U+FFFD.
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
pub(crate) mod tests {
    use super::*;

    /// This process as a VM of QEMU.
    pub(crate) fn own_process() -> Vm {
        let pid = std::process::id();
        Vm {
            id: VmId::new(Hypervisor::Qemu, "me"),
            name: "me".into(),
            hypervisor: Hypervisor::Qemu,
            pid,
            start_time: crate::proc::stat(pid).unwrap().unwrap().start_time,
            vcpus: Vec::new(),
            service: Vec::new(),
            disks: Vec::new(),
            nics: Vec::new(),
            cgroup: None,
            cores: CpuSet::new(),
            status: None,
            uuid: None,
            libvirt: false,
            confirmed: None,
        }
    }

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
