// SPDX-License-Identifier: Apache-2.0
//! A process by descriptor, pidfd_open(2): unlike its number, it never means another process.

use std::os::fd::OwnedFd;

use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::process::{Pid, PidfdFlags, pidfd_open};

use crate::proc::{self, Stat};

/// A process that the inventory has read.
pub(crate) struct ProcessFd(OwnedFd);

impl ProcessFd {
    /// Opens the process that `stat` was read of; `None` when it has ended since, or the kernel gives no descriptor.
    pub(crate) fn open(stat: &Stat) -> Option<Self> {
        let pid = i32::try_from(stat.tid).ok().and_then(Pid::from_raw)?;
        let process = Self(pidfd_open(pid, PidfdFlags::empty()).ok()?);
        // The number was this process's before the descriptor was opened, and still is if the start time is the same.
        let now = proc::stat(stat.tid).ok().flatten()?;
        (now.start_time == stat.start_time).then_some(process)
    }

    /// Whether the process has ended. What was read of its number before it ended is its own.
    pub(crate) fn has_ended(&self) -> bool {
        let mut fds = [PollFd::new(&self.0, PollFlags::IN)];
        let at_once = Timespec {
            tv_sec: 0,
            tv_nsec: 0,
        };
        matches!(poll(&mut fds, Some(&at_once)), Ok(ready) if ready > 0)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_descriptor_knows_its_process_has_ended() {
        let mut child = std::process::Command::new("sleep")
            .arg("600")
            .spawn()
            .unwrap();
        let pid = child.id();
        let stat = proc::stat(pid).unwrap().unwrap();
        let process = ProcessFd::open(&stat).unwrap();
        assert!(!process.has_ended());
        child.kill().unwrap();
        child.wait().unwrap();
        assert!(process.has_ended());
        assert!(ProcessFd::open(&stat).is_none());
        let own = proc::stat(std::process::id()).unwrap().unwrap();
        let other = Stat {
            start_time: own.start_time + 1,
            ..own
        };
        assert!(
            ProcessFd::open(&other).is_none(),
            "another process of this number"
        );
    }
}
