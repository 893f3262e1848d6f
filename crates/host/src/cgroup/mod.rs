// SPDX-License-Identifier: Apache-2.0
//! CPU control groups: what weight and quota a VM's group gives it, in version 1 and 2.
//!
//! Real-time classes ignore both, so whoever makes a VM's threads real-time has to keep to them itself.

mod mounts;
mod place;

use std::fmt;
use std::path::{Path, PathBuf};

use serde::{Deserialize, Serialize};

use crate::check;
use crate::error::HostError;
use crate::proc;
use crate::vm::Tid;

pub use mounts::Mounts;
use place::{Place, min_of};

/// Weight of a group that nobody changed, in the scale of this crate (that of Xen's credit scheduler).
pub const DEFAULT_WEIGHT: u32 = 256;

/// Version of the hierarchy that has the `cpu` controller.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Version {
    /// `cpu.shares`, `cpu.cfs_quota_us`.
    V1,
    /// `cpu.weight`, `cpu.max`.
    V2,
}

/// The CPU control group of a VM.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Cgroup {
    /// Version of its hierarchy.
    pub version: Version,
    /// The VM's group as `/proc/PID/cgroup` writes it, without the subgroups libvirt makes for
    /// emulator, vCPUs and iothreads. `/` when the VM has no group of its own.
    pub path: String,
    /// Weight against the groups beside it, 256 being the default: `cpu.shares`·256/1024 or
    /// `cpu.weight`·256/100, at least 1. `None` in the root group and where the controller is off: the
    /// VM's threads then compete one by one.
    pub weight: Option<u32>,
    /// CPU time all its threads together may use, in thousandths of one core: the lowest quota among the
    /// group and its ancestors. `None` without any. 1500 is one core and a half.
    pub quota_permille_of_one_core: Option<u32>,
    /// The same for a single vCPU, from the subgroups that libvirt makes (`vcpu_quota`); the lowest one.
    pub vcpu_quota_permille: Option<u32>,
}

/// Takes away the subgroups that libvirt makes inside of a VM's group.
fn machine_group(group: &str) -> &str {
    let mut machine = group;
    while let Some((above, last)) = machine.rsplit_once('/') {
        let is_numbered = |prefix| {
            last.strip_prefix(prefix)
                .is_some_and(|n: &str| !n.is_empty() && n.bytes().all(|b| b.is_ascii_digit()))
        };
        let is_part = matches!(last, "emulator" | "libvirt")
            || is_numbered("vcpu")
            || is_numbered("iothread");
        if !is_part || above.is_empty() {
            break;
        }
        machine = above;
    }
    machine
}

impl Mounts {
    /// Which version's hierarchy has the `cpu` controller for this program; `None` without any.
    ///
    /// # Errors
    /// [`HostError::Read`] for `/proc/self/cgroup`.
    pub fn cpu_version(&self) -> Result<Option<Version>, HostError> {
        Ok(self.place(std::process::id())?.map(|p| p.version))
    }

    fn place(&self, tid: Tid) -> Result<Option<Place<'_>>, HostError> {
        let text = proc::read_text(format!("/proc/{tid}/cgroup"))?;
        Ok(text.and_then(|t| self.place_in(&t)))
    }

    /// The CPU group of the VM whose main thread is `pid` and whose vCPUs are `vcpus`; `None` when it is
    /// gone or the host has no such groups.
    ///
    /// # Errors
    /// [`HostError::Read`] with the file.
    pub fn of_vm(&self, pid: Tid, vcpus: &[Tid]) -> Result<Option<Cgroup>, HostError> {
        let Some(place) = self.place(pid)? else {
            return Ok(None);
        };
        let machine = machine_group(&place.group);
        let mut vcpu_quota = None;
        for &vcpu in vcpus {
            let Some(own) = self.place(vcpu)? else {
                continue;
            };
            // A vCPU that somebody moved elsewhere does not tell about this VM's group.
            if own.group != machine && Path::new(&own.group).starts_with(machine) {
                vcpu_quota = min_of(vcpu_quota, own.lowest_quota(&own.group, Some(machine))?);
            }
        }
        Ok(Some(Cgroup {
            version: place.version,
            path: machine.to_owned(),
            weight: place.weight(machine)?,
            quota_permille_of_one_core: place.lowest_quota(machine, None)?,
            vcpu_quota_permille: vcpu_quota,
        }))
    }

    /// Whether the thread's control group forbids it to become real-time, and which group that is.
    ///
    /// In a kernel with `CONFIG_RT_GROUP_SCHED` a `cpu` group other than the root starts without real-time
    /// run time (version 1: `cpu.rt_runtime_us` 0; version 2 has no file to change it), and `SCHED_FIFO` is
    /// refused to its threads with `EPERM`, unless the system's real-time throttling is off as a whole
    /// (`sched_rt_runtime_us` -1). In version 2 the kernel's configuration has to be readable to tell.
    ///
    /// # Errors
    /// [`HostError::Read`] with the file.
    pub fn rt_group_blocks(&self, tid: Tid) -> Result<Option<RtBlock>, HostError> {
        let throttling = proc::read_text("/proc/sys/kernel/sched_rt_runtime_us")?;
        if throttling.is_some_and(|t| t.trim() == "-1") {
            return Ok(None);
        }
        let Some(place) = self.place(tid)? else {
            return Ok(None);
        };
        self.blocked_at(&place)
    }

    fn blocked_at(&self, place: &Place<'_>) -> Result<Option<RtBlock>, HostError> {
        let is_blocked = match place.version {
            Version::V1 => {
                let runtime = place.file(&place.group, "cpu.rt_runtime_us")?;
                runtime.is_some_and(|t| t.trim() == "0")
            }
            Version::V2 => place.has_cpu_group()? && check::rt_group_sched(self) == Some(true),
        };
        Ok(is_blocked.then(|| RtBlock {
            version: place.version,
            group: place.group.clone(),
            folder: place.mount.folder(&place.group).unwrap_or_default(),
        }))
    }

    /// Whether a version 1 hierarchy shows that real-time group scheduling is built in; `None` when no
    /// such hierarchy is there to tell.
    #[must_use]
    pub fn has_rt_groups(&self) -> Option<bool> {
        let mount = self.cpu_v1.as_ref()?;
        Some(mount.point.join("cpu.rt_runtime_us").exists())
    }
}

/// A control group whose threads may not become real-time.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct RtBlock {
    /// Version of its hierarchy.
    pub version: Version,
    /// The group as `/proc/PID/cgroup` writes it.
    pub group: String,
    /// Its folder.
    pub folder: PathBuf,
}

impl fmt::Display for RtBlock {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(
            f,
            "its control group {} has no real-time run time; ",
            self.group
        )?;
        match self.version {
            Version::V1 => write!(
                f,
                "move the VM to the root cpu group, or set {}",
                self.folder.join("cpu.rt_runtime_us").display()
            ),
            Version::V2 => f.write_str(
                "boot with rt_group_sched=0 (Linux 6.15), or move the VM to the root group",
            ),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn libvirts_subgroups_are_not_the_vms_group() {
        let scope = "/machine.slice/machine-qemu\\x2d1\\x2dweb.scope";
        for part in [
            "/libvirt/emulator",
            "/libvirt/vcpu0",
            "/libvirt/vcpu12",
            "/libvirt/iothread1",
            "/emulator",
            "",
        ] {
            assert_eq!(machine_group(&format!("{scope}{part}")), scope);
        }
        assert_eq!(
            machine_group("/qemu.slice/100.scope"),
            "/qemu.slice/100.scope"
        );
        assert_eq!(machine_group("/vcpus"), "/vcpus");
        assert_eq!(machine_group("/vcpu0"), "/vcpu0");
        assert_eq!(machine_group("/"), "/");
    }

    proptest! {
        #[test]
        fn the_machines_group_is_the_group_or_an_ancestor(group in "(/(vcpu[0-9]?|emulator|libvirt|a)?){0,6}") {
            prop_assert!(group.starts_with(machine_group(&group)));
        }
    }
}
