// SPDX-License-Identifier: Apache-2.0
//! The weight and quota of a VM's CPU control group, in cgroup versions 1 and 2.
//!
//! Real-time classes ignore both; a scheduler that gives VMs real-time priorities must enforce them itself.

mod group_cache;
mod members;
mod mounts;
mod place;
mod rt;
mod version;

use std::path::PathBuf;
use std::time::Instant;

use serde::{Deserialize, Serialize};

use crate::error::HostError;
use crate::thread::Tid;

pub(crate) use group_cache::GroupCache;
pub use members::members;
pub use mounts::Mounts;
use place::parent;
pub use rt::RtBlock;
pub(crate) use rt::rt_group_sched;
pub use version::Version;

/// The CPU control group of a VM.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Cgroup {
    /// Version of its hierarchy.
    pub version: Version,
    /// The VM's group as in `/proc/PID/cgroup`, without the subgroups that libvirt makes for emulator, vCPUs and
    /// iothreads. `/` when the VM has no group of its own.
    pub path: String,
    /// Weight against sibling groups, 256 by default: `cpu.shares`·256/1024 or `cpu.weight`·256/100, at least 1. `None`
    /// in the root group and without the controller: the VM's threads then compete one by one.
    pub weight: Option<u32>,
    /// CPU time that all its threads together may use, in thousandths of one core (1500 is 1.5 cores): the lowest quota
    /// of the group and its ancestors. `None` without a quota.
    pub quota_permille_of_one_core: Option<u32>,
    /// The same for a single vCPU, from libvirt's subgroups (`vcpu_quota`): the lowest one.
    pub vcpu_quota_permille: Option<u32>,
}

/// Strips the subgroups that libvirt makes inside a VM's group.
fn vm_group(group: &str) -> &str {
    let mut group = group;
    while let Some((above, last)) = group.rsplit_once('/') {
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
        group = above;
    }
    group
}

impl Mounts {
    /// The folder of a group in the hierarchy with the `cpu` controller that a process is in, and those of all groups above it
    /// but the root. Empty when one of them cannot be seen.
    pub(crate) fn folders_of(&self, pid: Tid, group: &str) -> Vec<PathBuf> {
        let Ok(Some(place)) = self.place(pid) else {
            return Vec::new();
        };
        let above = std::iter::successors(Some(group), |group| parent(group));
        let groups = above.take_while(|group| *group != "/");
        let folders: Option<Vec<PathBuf>> = groups.map(|group| place.mount.folder(group)).collect();
        folders.unwrap_or_default()
    }

    /// The CPU group of the VM whose main process is `pid` and whose vCPU threads are `vcpus`; `None` when the VM has
    /// ended or the host has no such groups.
    ///
    /// # Errors
    /// [`HostError::Read`].
    pub fn of_vm(&self, pid: Tid, vcpus: &[Tid]) -> Result<Option<Cgroup>, HostError> {
        GroupCache::default().refresh(self, pid, vcpus, Instant::now())
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
            assert_eq!(vm_group(&format!("{scope}{part}")), scope);
        }
        assert_eq!(vm_group("/qemu.slice/100.scope"), "/qemu.slice/100.scope");
        assert_eq!(vm_group("/vcpus"), "/vcpus");
        assert_eq!(vm_group("/vcpu0"), "/vcpu0");
        assert_eq!(vm_group("/"), "/");
    }

    proptest! {
        #[test]
        fn the_machines_group_is_the_group_or_an_ancestor(group in "(/(vcpu[0-9]?|emulator|libvirt|a)?){0,6}") {
            prop_assert!(group.starts_with(vm_group(&group)));
        }
    }
}
