// SPDX-License-Identifier: Apache-2.0
//! Moves kernel threads that do I/O, and unbound workqueues.

use super::{Mode, Planner};
use crate::turbo::knob::{Knob, Part, TURBO_GROUP};

/// Name prefixes of kernel threads that do I/O: NAPI threads, file system journals and logs, stacked block devices,
/// network file systems.
const IO_THREAD_PREFIXES: [&str; 28] = [
    "napi/",
    "jbd2/",
    "xfsaild/",
    "btrfs-trans",
    "btrfs-clean",
    "f2fs_",
    "ext4lazyinit",
    "nfsd",
    "nfsv4",
    "lockd",
    "cifsd",
    "ceph-",
    "md",
    "dmcrypt_write",
    "dm_bufio",
    "bcache_",
    "loop",
    "nbd",
    "drbd_",
    "iscsi_",
    "scsi_eh_",
    "nvme",
    "vhost-",
    "z_wr_",
    "z_rd_",
    "txg_sync",
    "kjournald",
    "ublk",
];

/// Whether a kernel thread of this name does I/O. Per-CPU threads (`ksoftirqd/1`) serve their CPU, interrupt threads
/// (`irq/24-nvme0q1`) follow their interrupt, and `kworker` its workqueue: none of them is moved.
pub fn serves_io(name: &str) -> bool {
    let begins = IO_THREAD_PREFIXES
        .iter()
        .any(|start| name.starts_with(start));
    // md127_raid1 and md0_resync, but no other names that begin with md
    let is_array = |name: &str| name[2..].starts_with(|c: char| c.is_ascii_digit());
    begins && (!name.starts_with("md") || is_array(name))
}

impl Planner<'_> {
    pub(super) fn workqueues(&mut self) {
        self.step(Part::Workqueues, Knob::Workqueues, self.turbo.to_string());
    }

    pub(super) fn threads(&mut self) {
        let tasks = self.now.tasks.iter();
        let moved: Vec<i32> = tasks
            .filter(|(_, task)| task.kernel && !task.fixed && serves_io(&task.name))
            .map(|(tid, _)| *tid)
            .collect();
        for tid in moved {
            match self.plan.mode {
                // threads outside of the partition cannot run on its CPU, not even by
                // sched_setaffinity
                Mode::Partition => {
                    let there = format!("/{TURBO_GROUP} {}", self.turbo);
                    self.step(Part::Threads, Knob::Member { tid }, there);
                }
                _ => {
                    let cpus = self.turbo.to_string();
                    self.step(Part::Threads, Knob::Thread { tid }, cpus);
                }
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::serves_io;

    #[test]
    fn io_threads_are_recognised_by_name() {
        for name in [
            "jbd2/vda1-8",
            "napi/eth0-8193",
            "md127_raid1",
            "xfsaild/dm-0",
            "nfsd",
        ] {
            assert!(serves_io(name), "{name}");
        }
        for name in [
            "ksoftirqd/1",
            "kworker/u8:2",
            "mdadm",
            "md",
            "migration/0",
            "kswapd0",
            "rcu_preempt",
            "irq/24-nvme0q1",
        ] {
            assert!(!serves_io(name), "{name}");
        }
    }
}
