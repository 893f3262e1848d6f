// SPDX-License-Identifier: Apache-2.0
//! Processes identified by pid and start time, so that a reused pid is not mistaken for the
//! process.

use std::time::Duration;

use rustix::process::{Pid, Signal, kill_process};
use serde::{Deserialize, Serialize};

/// Identity of a process.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct ProcessId {
    pub(crate) pid: u32,
    /// Start time in clock ticks since the host's boot.
    pub(crate) start: u64,
}

/// State, session and start time of a process.
struct Stat {
    state: char,
    session: u32,
    start: u64,
}

fn stat(pid: u32) -> Option<Stat> {
    let line = std::fs::read_to_string(format!("/proc/{pid}/stat")).ok()?;
    let mut fields = line.rsplit_once(") ")?.1.split(' ');
    let state = fields.next()?.chars().next()?;
    let session = fields.nth(2)?.parse().ok()?;
    let start = fields.nth(15)?.parse().ok()?;
    Some(Stat {
        state,
        session,
        start,
    })
}

impl ProcessId {
    pub(crate) fn of(pid: u32) -> Option<Self> {
        Some(Self {
            pid,
            start: stat(pid)?.start,
        })
    }

    /// Whether the process exists and is no zombie.
    pub(crate) fn alive(self) -> bool {
        stat(self.pid).is_some_and(|s| s.start == self.start && s.state != 'Z')
    }

    pub(crate) fn kill(self) {
        if let (true, Some(pid)) = (self.alive(), Pid::from_raw(self.pid.cast_signed())) {
            let _ = kill_process(pid, Signal::KILL);
        }
    }

    /// Kills the process and what is left of its session, and waits until all are gone.
    ///
    /// A guest's kernel leads a session of its own processes only, which end shortly after it. But
    /// one that was being started when the kernel was killed (before its `PR_SET_PDEATHSIG`) sleeps
    /// for ever. This kills only processes that run the guest's kernel or its user-space stub.
    pub(crate) fn kill_session(self) {
        self.kill();
        for _ in 0..200 {
            let left = self.session();
            if left.is_empty() && !self.alive() {
                break;
            }
            left.into_iter().for_each(Self::kill);
            std::thread::sleep(Duration::from_millis(5));
        }
    }

    /// Living members of the session that this process leads or led.
    fn session(self) -> Vec<Self> {
        let member = |pid: u32| {
            let stat = stat(pid)?;
            let ours = stat.session == self.pid && stat.start >= self.start && stat.state != 'Z';
            // an exiting process has no program any more
            let guest = std::fs::read_link(format!("/proc/{pid}/exe")).map_or(true, |program| {
                let program = program.to_string_lossy();
                program.contains("uml-userspace") || program.contains("linux.uml")
            });
            (ours && guest).then_some(Self {
                pid,
                start: stat.start,
            })
        };
        std::fs::read_dir("/proc")
            .into_iter()
            .flatten()
            .flatten()
            .filter_map(|entry| member(entry.file_name().to_str()?.parse().ok()?))
            .collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_process_with_another_start_time_is_not_alive() {
        let me = ProcessId::of(std::process::id()).unwrap();
        assert!(me.alive());
        assert!(
            !ProcessId {
                start: me.start + 1,
                ..me
            }
            .alive()
        );
    }

    #[test]
    fn a_process_with_a_reused_pid_is_not_killed() {
        let mut child = std::process::Command::new("sleep")
            .arg("60")
            .spawn()
            .unwrap();
        let id = ProcessId::of(child.id()).unwrap();
        ProcessId {
            start: id.start + 1,
            ..id
        }
        .kill_session();
        assert!(id.alive());
        id.kill();
        child.wait().unwrap();
        assert!(!id.alive());
    }
}
