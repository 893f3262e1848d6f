// SPDX-License-Identifier: Apache-2.0
//! The processes of a group.

use std::fs;
use std::path::{Path, PathBuf};

use super::Mounts;
use crate::error::HostError;
use crate::proc;
use crate::thread::Tid;

/// Most groups below one that are read: a user may make as many as there is memory for.
const MAX_GROUPS: usize = 4096;

impl Mounts {
    /// The folder of a group in the hierarchy with the `cpu` controller that a process is in; `None` when it cannot be seen.
    ///
    /// # Errors
    /// [`HostError::Read`] for `/proc/PID/cgroup`.
    pub fn folder(&self, pid: Tid, group: &str) -> Result<Option<PathBuf>, HostError> {
        Ok(self.place(pid)?.and_then(|place| place.mount.folder(group)))
    }
}

/// The processes of the group in `folder` and of all groups below it; empty when it is gone. With version 1 a process belongs to
/// each group that has one of its threads.
#[must_use]
pub fn members(folder: &Path) -> Vec<Tid> {
    let mut folders = vec![folder.to_owned()];
    let mut found = Vec::new();
    let mut next = 0;
    while let Some(folder) = folders.get(next).cloned() {
        next += 1;
        // A threaded group has no list: its processes are in the list of the group above.
        if let Ok(Some(list)) = proc::read_text(folder.join("cgroup.procs")) {
            // 0 is a process outside of this process's PID namespace.
            let numbers = list.lines().filter_map(|line| line.parse().ok());
            found.extend(numbers.filter(|&pid: &Tid| pid != 0));
        }
        for entry in fs::read_dir(&folder).into_iter().flatten().flatten() {
            if folders.len() < MAX_GROUPS && entry.file_type().is_ok_and(|t| t.is_dir()) {
                folders.push(entry.path());
            }
        }
    }
    found.sort_unstable();
    found.dedup();
    found
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn processes_of_all_groups_below_are_members() {
        let dir = tempfile::tempdir().unwrap();
        let write = |group: &str, text: &str| {
            fs::create_dir_all(dir.path().join(group)).unwrap();
            fs::write(dir.path().join(group).join("cgroup.procs"), text).unwrap();
        };
        write("", "7\n9\n");
        write("libvirt/emulator", "9\n0\n8\n");
        fs::create_dir_all(dir.path().join("libvirt/vcpu0")).unwrap();
        assert_eq!(members(dir.path()), [7, 8, 9]);
        assert_eq!(members(&dir.path().join("gone")), [] as [Tid; 0]);
    }

    #[test]
    fn this_process_is_a_member_of_its_own_group() {
        let mounts = Mounts::read().unwrap();
        let own = std::process::id();
        let Some(group) = mounts.of_vm(own, &[]).unwrap() else {
            return;
        };
        if let Some(folder) = mounts.folder(own, &group.path).unwrap() {
            assert!(members(&folder).contains(&own), "{}", folder.display());
        }
    }
}
