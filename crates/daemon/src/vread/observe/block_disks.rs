// SPDX-License-Identifier: Apache-2.0
//! Which disks of a DataNode VM the workers that read its blocks may hold: those that hold blocks.

use std::collections::BTreeMap;
use std::time::{Duration, Instant};

use super::disks::Disk;

/// Readers keep a disk for this long after the agent's worker has last reported blocks on it. An agent that starts again, or a
/// worker that is replaced, needs some seconds to name blocks again.
const KEEP_TIMEOUT: Duration = Duration::from_secs(60);

/// Numbers of these disks, each with the time of the last report.
#[derive(Debug, Default)]
pub struct BlockDisks(BTreeMap<u32, Instant>);

impl BlockDisks {
    /// Takes a report of the agent's worker. Returns the disks that readers have to close.
    pub fn update(&mut self, now: Instant, reported: &[u32]) -> Vec<u32> {
        self.0.extend(reported.iter().map(|id| (*id, now)));
        let is_old = |at: &Instant| now.saturating_duration_since(*at) >= KEEP_TIMEOUT;
        let old: Vec<u32> = (self.0.iter())
            .filter(|(_, at)| is_old(at))
            .map(|(id, _)| *id)
            .collect();
        self.0.retain(|_, at| !is_old(at));
        old
    }

    /// Forgets disks that the VM does not have any more. A disk that returns has to hold blocks first.
    pub fn retain(&mut self, disks: &[Disk]) {
        self.0
            .retain(|id, _| disks.iter().any(|d| d.spec.id == *id));
    }

    /// Those among the disks of the VM that readers may hold.
    pub fn of<'a>(&self, disks: &'a [Disk]) -> Vec<&'a Disk> {
        let has_blocks = |disk: &&Disk| self.0.contains_key(&disk.spec.id);
        disks.iter().filter(has_blocks).collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_disk_is_kept_for_a_minute_after_its_last_report() {
        let mut disks = BlockDisks::default();
        let start = Instant::now();
        let at = |s| start + Duration::from_secs(s);
        assert!(disks.update(start, &[7, 8]).is_empty());
        assert!(disks.update(at(40), &[8]).is_empty());
        assert_eq!(disks.update(at(60), &[]), [7]);
        assert!(disks.update(at(99), &[]).is_empty());
        assert_eq!(disks.update(at(100), &[]), [8]);
        disks.update(at(101), &[9]);
        disks.retain(&[]);
        assert!(disks.0.is_empty());
    }
}
