// SPDX-License-Identifier: Apache-2.0
//! A VM that stands still: its connections on the host do as well, and its disks are not written to.
//!
//! A process that is stopped, or a control group that is frozen, tells nobody. So while there is something under way the kernel is
//! asked every [`POLL_INTERVAL`], by a thread of its own, which is not kept by a slow disk. What was stopped goes on where it was: nothing
//! can be done to a VM meanwhile but to end it.

use std::fs::File;
use std::io;
use std::os::fd::OwnedFd;
use std::os::unix::fs::FileExt;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use super::wake;
use crate::EgressGate;

/// Time between two looks.
const POLL_INTERVAL: Duration = Duration::from_millis(25);
/// Longest text that is read of a file of the kernel's.
const MAX_STATUS_BYTES: usize = 1024;

/// By what it is seen whether a VM stands still.
#[derive(Debug, Default)]
pub struct PauseProbe {
    threads: Vec<File>,
    group: Option<File>,
}

impl PauseProbe {
    /// `threads` are `/proc/PID/task/TID/stat` of its vCPUs, `group` is `cgroup.events` of the control group that they are in.
    pub fn new(threads: Vec<OwnedFd>, group: Option<OwnedFd>) -> Self {
        Self {
            threads: threads.into_iter().map(File::from).collect(),
            group: group.map(File::from),
        }
    }

    /// Whether all vCPUs are stopped, or the group is frozen. What cannot be read does not stand still.
    fn is_paused(&self) -> bool {
        let stopped = |file| read(file, |text| state(text) == Some(b'T'));
        let frozen = |file| read(file, is_frozen);
        (!self.threads.is_empty() && self.threads.iter().all(stopped))
            || self.group.as_ref().is_some_and(frozen)
    }
}

fn read(file: &File, what: impl FnOnce(&[u8]) -> bool) -> bool {
    let mut text = [0; MAX_STATUS_BYTES];
    let got = file.read_at(&mut text, 0);
    got.is_ok_and(|got| what(&text[..got]))
}

/// Third field of proc_pid_stat(5). The name before it may have parentheses of its own.
fn state(stat: &[u8]) -> Option<u8> {
    let close = stat.iter().rposition(|&byte| byte == b')')?;
    stat.get(close + 2).copied()
}

/// Of `cgroup.events`: the group is frozen, or one above it (kernel Documentation/admin-guide/cgroup-v2.rst).
fn is_frozen(events: &[u8]) -> bool {
    events
        .split(|&byte| byte == b'\n')
        .any(|line| line == b"frozen 1")
}

/// Who has something under way.
#[derive(Debug, Clone, Copy)]
pub(super) enum Thread {
    Connections,
    Copies,
}

#[derive(Debug)]
struct Inner {
    probe: PauseProbe,
    busy: [bool; 2],
    stopping: bool,
}

/// What the threads share.
#[derive(Debug)]
pub(super) struct PauseWatch {
    now: AtomicBool,
    inner: Mutex<Inner>,
    changed_cond: Condvar,
}

impl PauseWatch {
    /// Starts the thread. `gate` is shut while the VM stands still; `changed` is told of each change.
    pub(super) fn start(gate: EgressGate, changed: Arc<OwnedFd>) -> io::Result<Arc<Self>> {
        let inner = Inner {
            probe: PauseProbe::default(),
            busy: [false; 2],
            stopping: false,
        };
        let shared = Arc::new(Self {
            now: AtomicBool::new(false),
            inner: Mutex::new(inner),
            changed_cond: Condvar::new(),
        });
        let its = shared.clone();
        std::thread::Builder::new()
            .name("viola-pulse".into())
            .spawn(move || its.run(&gate, &changed))?;
        Ok(shared)
    }

    /// Whether the VM stands still; as far as is known `false` while nothing is under way.
    pub(super) fn is_paused(&self) -> bool {
        self.now.load(Ordering::Acquire)
    }

    pub(super) fn watch(&self, probe: PauseProbe) {
        self.lock().probe = probe;
    }

    /// Whether there is something under way now.
    pub(super) fn set_busy(&self, who: Thread, busy: bool) {
        let mut inner = self.lock();
        if std::mem::replace(&mut inner.busy[who as usize], busy) != busy {
            self.changed_cond.notify_one();
        }
    }

    pub(super) fn stop(&self) {
        self.lock().stopping = true;
        self.changed_cond.notify_one();
    }

    fn lock(&self) -> MutexGuard<'_, Inner> {
        self.inner.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn run(&self, gate: &EgressGate, changed: &OwnedFd) {
        let mut inner = self.lock();
        while !inner.stopping {
            let busy = inner.busy.contains(&true);
            let paused = busy && inner.probe.is_paused();
            // a gate that cannot be shut leaves what the sockets have already; the threads move no more anyway
            if paused != self.is_paused() {
                let _ = gate.set_closed(paused);
                self.now.store(paused, Ordering::Release);
                wake(changed);
            }
            inner = if busy {
                let waited = self.changed_cond.wait_timeout(inner, POLL_INTERVAL);
                waited.unwrap_or_else(PoisonError::into_inner).0
            } else {
                let waited = self.changed_cond.wait(inner);
                waited.unwrap_or_else(PoisonError::into_inner)
            };
        }
        let _ = gate.set_closed(false);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_state_is_read_behind_whatever_name() {
        assert_eq!(state(b"7 (a) T (b) T 1 7"), Some(b'T'));
        assert_eq!(state(b"7 (linux) S 1 7"), Some(b'S'));
        for bad in [&b""[..], b"7 (linux", b"7 (linux)", b"7 (linux) "] {
            assert_eq!(state(bad), None);
        }
    }

    #[test]
    fn a_frozen_group_is_known_by_its_line_alone() {
        assert!(is_frozen(b"populated 1\nfrozen 1\n"));
        assert!(!is_frozen(b"populated 1\nfrozen 0\n"));
        assert!(!is_frozen(b"populated 1\nunfrozen 1\n"));
    }

    #[test]
    fn a_vm_stands_still_when_all_its_threads_do() {
        let (a, b) = (
            tempfile::NamedTempFile::new(),
            tempfile::NamedTempFile::new(),
        );
        let (a, b) = (a.unwrap(), b.unwrap());
        let open = |file: &tempfile::NamedTempFile| OwnedFd::from(file.reopen().unwrap());
        let probe = PauseProbe::new(vec![open(&a), open(&b)], None);
        assert!(!probe.is_paused());
        std::fs::write(&a, "7 (x) T 1").unwrap();
        std::fs::write(&b, "8 (x) R 1").unwrap();
        assert!(!probe.is_paused());
        std::fs::write(&b, "8 (x) T 1").unwrap();
        assert!(probe.is_paused());
        assert!(!PauseProbe::default().is_paused());
        std::fs::write(&a, "populated 1\nfrozen 1\n").unwrap();
        assert!(PauseProbe::new(vec![open(&b)], Some(open(&a))).is_paused());
        assert!(PauseProbe::new(Vec::new(), Some(open(&a))).is_paused());
    }
}
