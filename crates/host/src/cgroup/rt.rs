// SPDX-License-Identifier: Apache-2.0
//! Real-time group scheduling (`CONFIG_RT_GROUP_SCHED`): whether a group lets its threads become real-time.

use std::fmt;
use std::path::PathBuf;

use serde::{Deserialize, Serialize};

use super::mounts::Mounts;
use super::place::Place;
use super::version::Version;
use crate::error::HostError;
use crate::proc;
use crate::thread::Tid;

/// A control group whose threads cannot become real-time.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct RtBlock {
    /// Version of its hierarchy.
    pub version: Version,
    /// The group as in `/proc/PID/cgroup`.
    pub group: String,
    /// Its folder in the file system.
    pub folder: PathBuf,
}

impl fmt::Display for RtBlock {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(
            f,
            "its control group {} has no real-time runtime; ",
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

impl Mounts {
    /// The control group that keeps a thread from becoming real-time, if there is one.
    ///
    /// With `CONFIG_RT_GROUP_SCHED` a new `cpu` group has no real-time runtime (version 1: `cpu.rt_runtime_us` is 0;
    /// version 2 has no file for it). The kernel then refuses `SCHED_FIFO` with `EPERM`, unless real-time throttling is off
    /// for the whole system (`sched_rt_runtime_us` -1). In version 2 the answer needs a readable kernel configuration.
    ///
    /// # Errors
    /// [`HostError::Read`].
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

    pub(super) fn blocked_at(&self, place: &Place<'_>) -> Result<Option<RtBlock>, HostError> {
        let is_blocked = match place.version {
            Version::V1 => {
                let runtime = place.file(&place.group, "cpu.rt_runtime_us")?;
                runtime.is_some_and(|t| t.trim() == "0")
            }
            Version::V2 => place.has_cpu_group()? && rt_group_sched(self) == Some(true),
        };
        Ok(is_blocked.then(|| RtBlock {
            version: place.version,
            group: place.group.clone(),
            folder: place.mount.folder(&place.group).unwrap_or_default(),
        }))
    }

    /// Whether the kernel has real-time group scheduling, by the files of a version 1 hierarchy; `None` without one.
    #[must_use]
    pub fn has_rt_groups(&self) -> Option<bool> {
        let mount = self.cpu_v1.as_ref()?;
        Some(mount.point.join("cpu.rt_runtime_us").exists())
    }
}

/// Whether the kernel has real-time group scheduling, by a version 1 hierarchy or the kernel's configuration and
/// command line; `None` when neither can be read.
pub(crate) fn rt_group_sched(mounts: &Mounts) -> Option<bool> {
    if let Some(answer) = mounts.has_rt_groups() {
        return Some(answer);
    }
    let release = proc::read_text("/proc/sys/kernel/osrelease")
        .ok()
        .flatten()?;
    let release = release.trim();
    let files = [
        format!("/boot/config-{release}"),
        format!("/lib/modules/{release}/config"),
    ];
    let config = files
        .iter()
        .find_map(|f| proc::read_text(f).ok().flatten())?;
    let command_line = proc::read_text("/proc/cmdline")
        .ok()
        .flatten()
        .unwrap_or_default();
    Some(rt_groups_of(&config, &command_line))
}

/// Whether it is built in and not switched off at boot (Linux 6.15 and later have `rt_group_sched=`).
fn rt_groups_of(config: &str, command_line: &str) -> bool {
    let has = |option: &str| config.lines().any(|line| line == option);
    let asked = command_line
        .split_ascii_whitespace()
        .rev()
        .find_map(|word| word.strip_prefix("rt_group_sched="));
    has("CONFIG_RT_GROUP_SCHED=y")
        && match asked {
            Some(word) => matches!(word, "1" | "y" | "Y" | "on"),
            None => !has("CONFIG_RT_GROUP_SCHED_DEFAULT_DISABLED=y"),
        }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn real_time_groups_can_be_built_in_and_yet_off() {
        let built = "CONFIG_RT_GROUP_SCHED=y\n";
        let off = "CONFIG_RT_GROUP_SCHED=y\nCONFIG_RT_GROUP_SCHED_DEFAULT_DISABLED=y\n";
        assert!(rt_groups_of(built, "quiet"));
        assert!(!rt_groups_of(built, "rt_group_sched=0"));
        assert!(!rt_groups_of(off, "quiet"));
        assert!(rt_groups_of(off, "rt_group_sched=0 rt_group_sched=1"));
        assert!(!rt_groups_of("# CONFIG_RT_GROUP_SCHED is not set\n", ""));
    }
}
