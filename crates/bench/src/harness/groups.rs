// SPDX-License-Identifier: Apache-2.0
//! What an operator of a stock host has: weights and quotas of cgroups, and static pinning (`<vcpupin>`).
//!
//! Linux groups processes outside cgroups by session (autogroup), and the weight of such a group on a core follows its
//! load there. A guest of this lab would get all of one core while it is nearly idle on the other. So each vCPU has its
//! own cgroup, as with libvirt.

use std::fs;
use std::path::{Path, PathBuf};

use viola_host::{CpuSet, Inventory, Tid, Vm, attrs};
use viola_lab::Guest;

use viola_cli::error::{Failure, Outcome, chain};

/// The kernel's cpu controller, version 1 or 2.
const CONTROLLERS: [&str; 2] = ["/sys/fs/cgroup/cpu", "/sys/fs/cgroup"];

/// Cgroups with guest threads; drop removes them.
pub struct Groups {
    /// File of the root group, and the file of a group, that accepts threads.
    threads: &'static str,
    root: PathBuf,
    created: Vec<PathBuf>,
    /// Files of guests' own groups, and what they had.
    changed: Vec<(PathBuf, String)>,
}

impl Groups {
    fn new() -> Outcome<Self> {
        let root = CONTROLLERS.map(Path::new).into_iter().find(|root| {
            root.join("tasks").exists() || root.join("cgroup.subtree_control").exists()
        });
        let none = || Failure::run("cannot find the cpu controller below /sys/fs/cgroup");
        let root = root.ok_or_else(none)?;
        let is_first_version = root.join("tasks").exists();
        if !is_first_version {
            write(&root.join("cgroup.subtree_control"), "+cpu")?;
        }
        Ok(Self {
            threads: if is_first_version {
                "tasks"
            } else {
                "cgroup.threads"
            },
            root: root.into(),
            created: Vec::new(),
            changed: Vec::new(),
        })
    }

    /// Static pinning: the first vCPU of every guest on `first`, its other threads on `others`, each in its own group.
    ///
    /// # Errors
    /// The cpu controller is missing or refuses the setting.
    pub fn pinned(guests: &[Guest], first: usize, others: usize) -> Outcome<Self> {
        let mut groups = Self::new()?;
        let inventory = scan()?;
        for guest in guests {
            let vm = find(&inventory, guest)?;
            for core in [first, others] {
                let group = groups.group(&format!("{}.{core}", guest.name()))?;
                let threads = vm.threads().map(|thread| thread.tid);
                let cpus: CpuSet = u32::try_from(core).ok().into_iter().collect();
                for tid in threads.filter(|tid| (*tid == vm.pid) == (core == first)) {
                    let _ = attrs::set_affinity(tid, &cpus).map_err(Failure::run)?;
                    groups.add_thread(tid, &group)?;
                }
            }
        }
        Ok(groups)
    }

    /// Limits a guest to 1/`of` of a core with a short period, so that it hardly waits.
    ///
    /// # Errors
    /// As [`Self::pinned`].
    pub fn part_of_core(guest: &Guest, of: u32) -> Outcome<Self> {
        /// Quota, microseconds; the kernel requires at least 1,000.
        const QUOTA_US: u32 = 1_000;
        let mut groups = Self::new()?;
        let group = groups.group(guest.name())?;
        groups.set_quota(&group, QUOTA_US, QUOTA_US * of)?;
        groups.add_guest(&scan()?, guest, &group)?;
        Ok(groups)
    }

    /// Gives guests weights (256 is the default) and caps in percent of a core. The period of the caps is libvirt's
    /// default, 100 ms. All other guests stay where they are, with the default weight.
    ///
    /// # Errors
    /// As [`Self::pinned`].
    pub fn limited(
        guests: &[Guest],
        weights: &[(String, u32)],
        caps: &[(String, u32)],
    ) -> Outcome<Self> {
        const PERIOD_US: u32 = 100_000;
        let of = |list: &[(String, u32)], guest: &Guest| {
            let entry = list.iter().find(|(name, _)| name == guest.name());
            entry.map(|(_, value)| *value)
        };
        let mut groups = Self::new()?;
        let inventory = scan()?;
        for guest in guests {
            let (weight, cap) = (of(weights, guest), of(caps, guest));
            if weight.is_none() && cap.is_none() {
                continue;
            }
            let weight = weight.unwrap_or(DEFAULT_WEIGHT);
            if let (false, Some(own)) = (groups.is_first_version(), guest.cgroup()) {
                groups.change(own.join("cpu.weight"), &weight_v2(weight).to_string())?;
                if let Some(cap) = cap {
                    let quota = PERIOD_US / 100 * cap;
                    groups.change(own.join("cpu.max"), &format!("{quota} {PERIOD_US}"))?;
                }
                continue;
            }
            let group = groups.group(guest.name())?;
            match groups.is_first_version() {
                true => write(&group.join("cpu.shares"), &shares(weight).to_string())?,
                false => write(&group.join("cpu.weight"), &weight_v2(weight).to_string())?,
            }
            if let Some(cap) = cap {
                groups.set_quota(&group, PERIOD_US / 100 * cap, PERIOD_US)?;
            }
            groups.add_guest(&inventory, guest, &group)?;
        }
        Ok(groups)
    }

    fn is_first_version(&self) -> bool {
        self.threads == "tasks"
    }

    fn set_quota(&self, group: &Path, quota_us: u32, period_us: u32) -> Outcome {
        if self.is_first_version() {
            write(&group.join("cpu.cfs_period_us"), &period_us.to_string())?;
            return write(&group.join("cpu.cfs_quota_us"), &quota_us.to_string());
        }
        write(&group.join("cpu.max"), &format!("{quota_us} {period_us}"))
    }

    /// Changes a file of a guest's own group. What it had is put back at the end.
    fn change(&mut self, file: PathBuf, text: &str) -> Outcome {
        let before = fs::read_to_string(&file)
            .map_err(|e| Failure::run(format!("{}: {e}", file.display())))?;
        self.changed.push((file.clone(), before));
        write(&file, text)
    }

    fn add_guest(&self, inventory: &Inventory, guest: &Guest, group: &Path) -> Outcome {
        for thread in find(inventory, guest)?.threads() {
            self.add_thread(thread.tid, group)?;
        }
        Ok(())
    }

    /// Creates an empty group.
    fn group(&mut self, name: &str) -> Outcome<PathBuf> {
        let name = format!("viola-bench.{}.{name}", std::process::id());
        let group = self.root.join(name);
        fs::create_dir_all(&group)
            .map_err(|e| Failure::run(format!("{}: {e}", group.display())))?;
        self.created.push(group.clone());
        if self.threads == "cgroup.threads" {
            write(&group.join("cgroup.type"), "threaded")?;
        }
        Ok(group)
    }

    /// Ignores a thread that has ended. New threads join the group of their creator.
    fn add_thread(&self, tid: Tid, group: &Path) -> Outcome {
        match write(&group.join(self.threads), &tid.to_string()) {
            Err(_) if !Path::new(&format!("/proc/{tid}")).exists() => Ok(()),
            done => done,
        }
    }
}

/// viola's default weight.
pub const DEFAULT_WEIGHT: u32 = 256;

/// A weight as `cpu.shares`, whose default is 1024.
fn shares(weight: u32) -> u32 {
    weight * 1024 / DEFAULT_WEIGHT
}

/// A weight as `cpu.weight`, whose default is 100.
fn weight_v2(weight: u32) -> u32 {
    (weight * 100 + DEFAULT_WEIGHT / 2) / DEFAULT_WEIGHT
}

fn scan() -> Outcome<Inventory> {
    Inventory::scan().map_err(|e| Failure::run(chain(&e)))
}

fn find<'a>(inventory: &'a Inventory, guest: &Guest) -> Outcome<&'a Vm> {
    let of_guest = |vm: &&Vm| vm.pid == guest.pid();
    let none = || Failure::run(format!("cannot find guest {}", guest.name()));
    inventory.vms().iter().find(of_guest).ok_or_else(none)
}

fn write(path: &Path, text: &str) -> Outcome {
    fs::write(path, text).map_err(|e| Failure::run(format!("{}: {e}", path.display())))
}

impl Drop for Groups {
    fn drop(&mut self) {
        for (file, before) in &self.changed {
            let _ = fs::write(file, before);
        }
        let root = self.root.join(self.threads);
        for group in &self.created {
            // New threads join the group of their creator.
            for _ in 0..100 {
                let text = fs::read_to_string(group.join(self.threads)).unwrap_or_default();
                for tid in text.lines() {
                    let _ = fs::write(&root, tid);
                }
                if fs::remove_dir(group).is_ok() {
                    break;
                }
                std::thread::sleep(std::time::Duration::from_millis(10));
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn weights_keep_their_ratio_in_both_versions() {
        assert_eq!([256, 512, 768].map(shares), [1024, 2048, 3072]);
        assert_eq!([256, 512, 768].map(weight_v2), [100, 200, 300]);
    }
}
