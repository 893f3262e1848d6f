// SPDX-License-Identifier: Apache-2.0
//! The mount points of the cgroup hierarchies.

use std::path::PathBuf;

use super::place::{Mount, Place};
use super::version::Version;
use crate::error::HostError;
use crate::proc;
use crate::thread::Tid;

/// Mount points of the hierarchies that can have the `cpu` controller.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Mounts {
    pub(super) cpu_v1: Option<Mount>,
    pub(super) v2: Option<Mount>,
}

impl Mounts {
    /// The version of the hierarchy with the `cpu` controller; `None` without one.
    ///
    /// # Errors
    /// [`HostError::Read`] for `/proc/self/cgroup`.
    pub fn cpu_version(&self) -> Result<Option<Version>, HostError> {
        Ok(self.place(std::process::id())?.map(|p| p.version))
    }

    pub(super) fn place(&self, tid: Tid) -> Result<Option<Place<'_>>, HostError> {
        let text = proc::read_text(format!("/proc/{tid}/cgroup"))?;
        Ok(text.and_then(|t| self.place_in(&t)))
    }

    /// Reads the mount points of this process.
    ///
    /// # Errors
    /// [`HostError::Read`] for `/proc/self/mountinfo`.
    pub fn read() -> Result<Self, HostError> {
        let text = proc::read_text("/proc/self/mountinfo")?.unwrap_or_default();
        Ok(Self::parse(&text))
    }

    /// Parses `/proc/PID/mountinfo`, proc_pid_mountinfo(5). Of several mounts of one hierarchy it keeps the one that
    /// shows most of it.
    #[must_use]
    pub fn parse(mountinfo: &str) -> Self {
        let mut mounts = Self::default();
        for line in mountinfo.lines() {
            let Some((left, right)) = line.split_once(" - ") else {
                continue;
            };
            let left: Vec<&str> = left.split(' ').collect();
            let right: Vec<&str> = right.split(' ').collect();
            let (Some(root), Some(point), Some(&kind)) = (left.get(3), left.get(4), right.first())
            else {
                continue;
            };
            let has_cpu = || {
                right
                    .get(2)
                    .is_some_and(|o| o.split(',').any(|o| o == "cpu"))
            };
            let slot = match kind {
                "cgroup2" => &mut mounts.v2,
                "cgroup" if has_cpu() => &mut mounts.cpu_v1,
                _ => continue,
            };
            let mount = Mount {
                root: PathBuf::from(unescape(root)),
                point: PathBuf::from(unescape(point)),
            };
            if slot
                .as_ref()
                .is_none_or(|old| mount.root.as_os_str().len() < old.root.as_os_str().len())
            {
                *slot = Some(mount);
            }
        }
        mounts
    }

    /// The folder of the version 2 group that a thread is in, whatever its controllers; `None` without one, or when the
    /// folder is outside the mount.
    ///
    /// # Errors
    /// [`HostError::Read`] for `/proc/TID/cgroup`.
    pub fn unified(&self, tid: Tid) -> Result<Option<PathBuf>, HostError> {
        let text = proc::read_text(format!("/proc/{tid}/cgroup"))?.unwrap_or_default();
        let group = text.lines().find_map(|line| line.strip_prefix("0::"));
        Ok(group.and_then(|group| self.v2.as_ref()?.folder(group)))
    }

    /// The hierarchy of this version that has the `cpu` controller or can have it.
    pub(super) fn hierarchy(&self, version: Version) -> Option<&Mount> {
        match version {
            Version::V1 => self.cpu_v1.as_ref(),
            Version::V2 => self.v2.as_ref(),
        }
    }

    /// Parses `/proc/PID/cgroup`. A version 1 hierarchy with the controller wins: version 2 cannot have it then.
    pub(super) fn place_in(&self, text: &str) -> Option<Place<'_>> {
        let lines = || {
            text.lines().filter_map(|line| {
                let mut parts = line.splitn(3, ':');
                Some((parts.next()?, parts.next()?, parts.next()?))
            })
        };
        let v1 = lines().find(|(_, controllers, _)| controllers.split(',').any(|c| c == "cpu"));
        let (version, group) = match v1 {
            Some((_, _, group)) => (Version::V1, group),
            None => (Version::V2, lines().find(|(id, _, _)| *id == "0")?.2),
        };
        let mount = self.hierarchy(version)?;
        let group = group.strip_suffix(" (deleted)").unwrap_or(group);
        Some(Place {
            version,
            mount,
            group: group.to_owned(),
        })
    }
}

/// Decodes the octal escapes of mountinfo (`\040` for a space).
fn unescape(field: &str) -> String {
    let mut out = Vec::with_capacity(field.len());
    let bytes = field.as_bytes();
    let mut at = 0;
    while let Some(&byte) = bytes.get(at) {
        let code = bytes
            .get(at + 1..at + 4)
            .filter(|d| byte == b'\\' && d.iter().all(|b| (b'0'..=b'7').contains(b)))
            .map(|d| d.iter().fold(0u32, |n, b| n * 8 + u32::from(b - b'0')))
            .and_then(|n| u8::try_from(n).ok());
        match code {
            Some(code) => {
                out.push(code);
                at += 4;
            }
            None => {
                out.push(byte);
                at += 1;
            }
        }
    }
    String::from_utf8_lossy(&out).into_owned()
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;
    use std::path::Path;

    const MIXED: &str = "\
31 23 0:28 / /sys/fs/cgroup rw,relatime - tmpfs tmpfs rw,mode=755
32 31 0:29 / /sys/fs/cgroup/cpu,cpuacct rw,relatime shared:9 - cgroup cgroup rw,cpu,cpuacct
34 31 0:31 / /sys/fs/cgroup/cpuset rw,relatime - cgroup cgroup rw,cpuset
41 31 0:38 / /sys/fs/cgroup/uni\\040fied rw,relatime - cgroup2 cgroup2 rw,nsdelegate
99 31 0:38 /docker/x /mnt rw - cgroup2 cgroup2 rw
";

    #[test]
    fn finds_both_hierarchies_in_mountinfo() {
        let mounts = Mounts::parse(MIXED);
        assert_eq!(
            mounts.cpu_v1.unwrap().point,
            Path::new("/sys/fs/cgroup/cpu,cpuacct")
        );
        assert_eq!(
            mounts.v2.unwrap().point,
            Path::new("/sys/fs/cgroup/uni fied")
        );
    }

    #[test]
    fn the_version_1_hierarchy_wins_when_it_has_the_controller() {
        let mounts = Mounts::parse(MIXED);
        let place = mounts
            .place_in("4:cpu,cpuacct:/a:b\n3:cpuset:/c\n0::/d\n")
            .unwrap();
        assert_eq!((place.version, place.group.as_str()), (Version::V1, "/a:b"));
        let place = mounts.place_in("3:cpuset:/c\n0::/d\n").unwrap();
        assert_eq!((place.version, place.group.as_str()), (Version::V2, "/d"));
        assert!(mounts.place_in("3:cpuset:/c\n").is_none());
    }

    proptest! {
        #[test]
        fn any_text_parses_without_a_panic(text in "(?s).{0,200}") {
            let mounts = Mounts::parse(&text);
            let _ = mounts.place_in(&text);
            let _ = unescape(&text);
        }
    }
}
