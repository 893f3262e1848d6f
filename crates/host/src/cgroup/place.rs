// SPDX-License-Identifier: Apache-2.0
//! A group's weight and quota, from its files.

use std::path::{Component, Path, PathBuf};

use super::version::Version;
use crate::error::HostError;
use crate::proc;

/// Default weight of a group in the scale of this crate (that of Xen's credit scheduler).
const DEFAULT_WEIGHT: u32 = 256;

/// One mounted hierarchy.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Mount {
    /// The group at the mount point, `/` on an ordinary host.
    pub(super) root: PathBuf,
    /// The mount point.
    pub(super) point: PathBuf,
}

impl Mount {
    /// The folder of a group; `None` when the group is outside the mount.
    pub(super) fn folder(&self, group: &str) -> Option<PathBuf> {
        let inside = Path::new(group).strip_prefix(&self.root).ok()?;
        // The kernel writes a group outside of the cgroup namespace with "..".
        let plain = inside
            .components()
            .all(|c| matches!(c, Component::Normal(_)));
        plain.then(|| self.point.join(inside))
    }
}

/// A thread's group in the hierarchy with the `cpu` controller.
pub(super) struct Place<'m> {
    pub(super) version: Version,
    pub(super) group: String,
    pub(super) mount: &'m Mount,
}

impl Place<'_> {
    /// The text of a file of the group; `None` without the file.
    pub(super) fn file(&self, group: &str, name: &str) -> Result<Option<String>, HostError> {
        match self.mount.folder(group) {
            Some(folder) => proc::read_text(folder.join(name)),
            None => Ok(None),
        }
    }

    pub(super) fn weight(&self, group: &str) -> Result<Option<u32>, HostError> {
        if group == "/" {
            return Ok(None);
        }
        let (name, default) = match self.version {
            Version::V1 => ("cpu.shares", 1024),
            Version::V2 => ("cpu.weight", 100),
        };
        let text = self.file(group, name)?;
        Ok(text.and_then(|t| scaled_weight(&t, default)))
    }

    fn quota(&self, group: &str) -> Result<Option<u32>, HostError> {
        Ok(match self.version {
            Version::V1 => {
                let quota = self.file(group, "cpu.cfs_quota_us")?;
                let period = self.file(group, "cpu.cfs_period_us")?;
                quota
                    .zip(period)
                    .and_then(|(q, p)| permille(q.trim(), p.trim()))
            }
            Version::V2 => self.file(group, "cpu.max")?.and_then(|text| {
                let (quota, period) = text.trim().split_once(' ')?;
                permille(quota, period)
            }),
        })
    }

    /// Version 2: whether the thread is in a group of the `cpu` controller other than the root. Threads below the last
    /// group with the controller belong to that group.
    pub(super) fn has_cpu_group(&self) -> Result<bool, HostError> {
        let mut at = Some(self.group.as_str());
        while let Some(group) = at.filter(|g| *g != "/") {
            if self.file(group, "cpu.weight")?.is_some() {
                return Ok(true);
            }
            at = parent(group);
        }
        Ok(false)
    }

    /// The lowest quota of `group` and its ancestors below `above`, thousandths of a core.
    pub(super) fn lowest_quota(
        &self,
        group: &str,
        above: Option<&str>,
    ) -> Result<Option<u32>, HostError> {
        let mut lowest = None;
        let mut at = Some(group);
        while let Some(group) = at.filter(|g| Some(*g) != above) {
            lowest = min_of(lowest, self.quota(group)?);
            at = parent(group);
        }
        Ok(lowest)
    }
}

pub(super) fn min_of(a: Option<u32>, b: Option<u32>) -> Option<u32> {
    a.into_iter().chain(b).min()
}

/// The parent group; `None` for the root.
pub(super) fn parent(group: &str) -> Option<&str> {
    match group.rsplit_once('/')? {
        ("", "") => None,
        ("", _) => Some("/"),
        (above, _) => Some(above),
    }
}

fn scaled_weight(text: &str, default: u64) -> Option<u32> {
    let weight: u64 = text.trim().parse().ok()?;
    let scaled = weight.checked_mul(u64::from(DEFAULT_WEIGHT))?;
    u32::try_from(((scaled + default / 2) / default).max(1)).ok()
}

/// Converts quota and period (us) to thousandths of a core; `None` for `max` and -1.
fn permille(quota: &str, period: &str) -> Option<u32> {
    let quota: u64 = quota.parse().ok()?;
    let period: u64 = period.parse().ok().filter(|&p| p > 0)?;
    u32::try_from(quota.checked_mul(1000)? / period).ok()
}

#[cfg(test)]
mod tests {
    use super::super::Mounts;
    use super::*;
    use proptest::prelude::*;
    use std::fs;

    fn write(folder: &Path, name: &str, text: &str) {
        fs::create_dir_all(folder).unwrap();
        fs::write(folder.join(name), text).unwrap();
    }

    fn at(point: &Path) -> Mount {
        Mount {
            root: "/".into(),
            point: point.into(),
        }
    }

    #[test]
    fn a_group_outside_of_the_mount_has_no_folder() {
        let mount = Mount {
            root: "/docker/x".into(),
            point: "/mnt".into(),
        };
        assert_eq!(mount.folder("/docker/x/vm"), Some("/mnt/vm".into()));
        assert_eq!(mount.folder("/docker/y"), None);
        assert_eq!(mount.folder("/docker/x/../../etc"), None);
    }

    #[test]
    fn weights_of_both_versions_have_one_scale() {
        assert_eq!(scaled_weight("1024\n", 1024), Some(256));
        assert_eq!(scaled_weight("100\n", 100), Some(256));
        assert_eq!(scaled_weight("200", 100), Some(512));
        assert_eq!(scaled_weight("2", 1024), Some(1), "never 0");
        assert_eq!(scaled_weight("18446744073709551615", 100), None);
        assert_eq!(scaled_weight("", 100), None);
    }

    #[test]
    fn the_effective_quota_is_the_lowest_on_the_way_to_the_root() {
        let dir = tempfile::tempdir().unwrap();
        let scope = "/m.slice/vm.scope";
        write(&dir.path().join("m.slice"), "cpu.max", "150000 100000\n");
        write(
            &dir.path().join("m.slice/vm.scope"),
            "cpu.max",
            "max 100000\n",
        );
        write(&dir.path().join("m.slice/vm.scope"), "cpu.weight", "50\n");
        write(
            &dir.path().join("m.slice/vm.scope/libvirt/vcpu0"),
            "cpu.max",
            "25000 50000\n",
        );
        let mount = at(dir.path());
        let place = Place {
            version: Version::V2,
            group: scope.into(),
            mount: &mount,
        };
        assert_eq!(place.lowest_quota(scope, None).unwrap(), Some(1500));
        assert_eq!(
            place
                .lowest_quota(&format!("{scope}/libvirt/vcpu0"), Some(scope))
                .unwrap(),
            Some(500)
        );
        assert_eq!(place.weight(scope).unwrap(), Some(128));
        assert_eq!(place.weight("/").unwrap(), None);
        assert_eq!(
            place.weight("/m.slice").unwrap(),
            None,
            "the controller is off there"
        );
    }

    #[test]
    fn version_1_quota_and_minus_one_are_understood() {
        let dir = tempfile::tempdir().unwrap();
        write(dir.path(), "cpu.cfs_quota_us", "-1\n");
        write(dir.path(), "cpu.cfs_period_us", "100000\n");
        write(&dir.path().join("vm"), "cpu.cfs_quota_us", "20000\n");
        write(&dir.path().join("vm"), "cpu.cfs_period_us", "100000\n");
        write(&dir.path().join("vm"), "cpu.rt_runtime_us", "0\n");
        let mount = at(dir.path());
        let place = Place {
            version: Version::V1,
            group: "/vm".into(),
            mount: &mount,
        };
        assert_eq!(place.lowest_quota("/vm", None).unwrap(), Some(200));
        assert_eq!(place.lowest_quota("/", None).unwrap(), None);
        let block = Mounts::default().blocked_at(&place).unwrap().unwrap();
        assert!(block.to_string().contains("/vm"), "{block}");
        write(&dir.path().join("vm"), "cpu.rt_runtime_us", "1000\n");
        assert_eq!(Mounts::default().blocked_at(&place).unwrap(), None);
    }

    #[test]
    fn below_the_last_group_with_the_controller_threads_belong_to_that_one() {
        let dir = tempfile::tempdir().unwrap();
        write(&dir.path().join("a"), "cpu.weight", "100\n");
        write(&dir.path().join("a/b"), "pids.max", "max\n");
        write(&dir.path().join("c"), "pids.max", "max\n");
        let mount = at(dir.path());
        let has = |group: &str| {
            let place = Place {
                version: Version::V2,
                group: group.into(),
                mount: &mount,
            };
            place.has_cpu_group().unwrap()
        };
        assert!(has("/a/b") && has("/a"));
        assert!(!has("/c") && !has("/"));
    }

    #[test]
    fn a_quota_over_a_period_of_zero_is_no_quota() {
        assert_eq!(permille("100", "0"), None);
        assert_eq!(permille("18446744073709551615", "1"), None);
        assert_eq!(permille("max", "100000"), None);
    }

    proptest! {
        #[test]
        fn every_group_has_an_end_to_its_ancestors(group in "(/[a-c]{0,3}){0,6}") {
            let mut at = Some(group.as_str());
            let mut steps = 0;
            while let Some(group) = at {
                at = parent(group);
                steps += 1;
                prop_assert!(steps < 40);
            }
        }
    }
}
