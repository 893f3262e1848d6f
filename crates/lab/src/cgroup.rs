// SPDX-License-Identifier: Apache-2.0
//! CPU cgroups of guests: v1 (`cpu.shares`) or v2 (`cpu.weight`).
//!
//! On v2 each KVM guest has a group, as libvirt's VMs have, so that its vCPUs and its vhost have one share together. A UML guest is
//! a session, which the kernel groups by itself. On v1 a guest without a weight has none: with real-time group scheduling, threads
//! outside the root group cannot become real-time.

use std::fs;
use std::path::{Path, PathBuf};

use crate::error::{Error, Result};
use crate::qemu::Accel;
use crate::spec::{DEFAULT_WEIGHT, GuestSpec, Vmm};

/// Mount point of the cpu controller.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum Controller {
    V1(PathBuf),
    V2(PathBuf),
}

impl Controller {
    pub(crate) fn find() -> Option<Self> {
        Self::parse(&fs::read_to_string("/proc/self/mountinfo").ok()?)
    }

    fn parse(mountinfo: &str) -> Option<Self> {
        let mut v2 = None;
        for line in mountinfo.lines() {
            let Some((left, right)) = line.split_once(" - ") else {
                continue;
            };
            let Some(place) = left.split(' ').nth(4).map(PathBuf::from) else {
                continue;
            };
            let mut right = right.split(' ');
            match right.next() {
                Some("cgroup")
                    if right
                        .nth(1)
                        .is_some_and(|o| o.split(',').any(|w| w == "cpu")) =>
                {
                    return Some(Self::V1(place));
                }
                Some("cgroup2") => v2 = v2.or(Some(place)),
                _ => {}
            }
        }
        v2.map(Self::V2)
    }

    /// The controller that makes the group of a guest, and its weight; `None` if it has no group.
    ///
    /// # Errors
    /// The guest has a weight, and the host no controller.
    pub(crate) fn of_guest(vmm: &Vmm, spec: &GuestSpec) -> Result<Option<(Self, u32)>> {
        let is_kvm = matches!(vmm, Vmm::Qemu(qemu) if qemu.accel == Some(Accel::Kvm));
        match (Self::find(), spec.weight) {
            (Some(controller), Some(weight)) => Ok(Some((controller, weight))),
            (None, Some(_)) => Err(Error::guest(
                &spec.name,
                "it has a `weight`, but this host has no cpu cgroup controller",
            )),
            (Some(controller @ Self::V2(_)), None) if is_kvm => {
                Ok(Some((controller, DEFAULT_WEIGHT)))
            }
            _ => Ok(None),
        }
    }

    /// Path of a lab's group.
    fn lab(&self, lab: &str) -> PathBuf {
        let (Self::V1(root) | Self::V2(root)) = self;
        root.join(format!("viola-lab-{lab}"))
    }

    /// Path of a guest's group.
    pub(crate) fn group(&self, lab: &str, guest: &str) -> PathBuf {
        self.lab(lab).join(guest)
    }

    /// Creates the group of a guest with its weight.
    pub(crate) fn make(&self, lab: &str, guest: &str, weight: u32) -> Result<PathBuf> {
        let lab = self.lab(lab);
        let group = lab.join(guest);
        let write =
            |file: PathBuf, text: String| fs::write(&file, text).map_err(Error::io("set", &file));
        if let Self::V2(root) = self {
            write(root.join("cgroup.subtree_control"), "+cpu".into())?;
        }
        fs::create_dir_all(&lab).map_err(Error::io("make", &lab))?;
        if let Self::V2(_) = self {
            write(lab.join("cgroup.subtree_control"), "+cpu".into())?;
        }
        fs::create_dir_all(&group).map_err(Error::io("make", &group))?;
        match self {
            // v1: 1024 shares are ordinary, 2 the minimum
            Self::V1(_) => write(
                group.join("cpu.shares"),
                (weight * 1024 / 100).max(2).to_string(),
            )?,
            Self::V2(_) => write(group.join("cpu.weight"), weight.to_string())?,
        }
        Ok(group)
    }
}

/// File to which a process writes `0` to enter the group.
pub(crate) fn procs(group: &Path) -> PathBuf {
    group.join("cgroup.procs")
}

/// The `cgroup.procs` of v1's root group, if this process is not in that group. A guest without a
/// weight enters the root group by it.
pub(crate) fn root_procs() -> Option<PathBuf> {
    let Some(Controller::V1(root)) = Controller::find() else {
        return None;
    };
    let own = fs::read_to_string("/proc/self/cgroup").ok()?;
    let group = own.lines().find_map(|line| {
        let mut parts = line.splitn(3, ':').skip(1);
        let cpu = parts.next()?.split(',').any(|c| c == "cpu");
        parts.next().filter(|_| cpu)
    });
    group.filter(|g| *g != "/").map(|_| procs(&root))
}

/// Removes a guest's group, and its lab's group after the last guest. The groups must have no
/// processes. Tries for a second, because the kernel notices the end of processes with a delay.
pub(crate) fn remove(group: &Path) {
    for _ in 0..100 {
        if fs::remove_dir(group).is_ok() || !group.exists() {
            break;
        }
        std::thread::sleep(std::time::Duration::from_millis(10));
    }
    if let Some(lab) = group.parent().filter(|l| {
        l.file_name()
            .is_some_and(|n| n.to_string_lossy().starts_with("viola-lab-"))
    }) {
        let _ = fs::remove_dir(lab);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const V1: &str = "30 22 0:26 / /sys/fs/cgroup/cpu,cpuacct rw - cgroup cgroup rw,cpu,cpuacct\n";
    const SET: &str = "30 22 0:26 / /sys/fs/cgroup/cpuset rw shared:4 - cgroup cgroup rw,cpuset\n";
    const V2: &str =
        "28 22 0:24 / /sys/fs/cgroup rw,nosuid shared:4 - cgroup2 cgroup2 rw,nsdelegate\n";

    #[test]
    fn a_v1_cpu_controller_is_preferred() {
        let both = format!("{V2}{SET}{V1}");
        assert_eq!(
            Controller::parse(&both),
            Some(Controller::V1("/sys/fs/cgroup/cpu,cpuacct".into()))
        );
        let only = format!("{SET}{V2}");
        assert_eq!(
            Controller::parse(&only),
            Some(Controller::V2("/sys/fs/cgroup".into()))
        );
        assert_eq!(Controller::parse(SET), None);
    }
}
