// SPDX-License-Identifier: Apache-2.0
//! Pauses the host's work for a VM while the VM is paused: its connections send nothing, and its disks are not
//! written to.
//!
//! The kernel sends no event when a process is stopped or a control group is frozen. So a thread of its own polls the
//! kernel every [`POLL_INTERVAL`] while the host works for the VM; a slow disk does not delay it. Work that was
//! paused goes on where it stopped.

use std::fs::File;
use std::io;
use std::os::fd::OwnedFd;
use std::os::unix::fs::FileExt;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use super::wake;
use crate::EgressGate;

/// Time between two polls.
const POLL_INTERVAL: Duration = Duration::from_millis(25);
/// Bytes read of a status file.
const MAX_STATUS_BYTES: usize = 1024;

/// Status files that show whether a VM is paused.
#[derive(Debug, Default)]
pub struct PauseProbe {
    threads: Vec<File>,
    group: Option<File>,
}

impl PauseProbe {
    /// `threads` are `/proc/PID/task/TID/stat` of the vCPUs, `group` is `cgroup.events` of their control group.
    pub fn new(threads: Vec<OwnedFd>, group: Option<OwnedFd>) -> Self {
        Self {
            threads: threads.into_iter().map(File::from).collect(),
            group: group.map(File::from),
        }
    }

    /// Whether all vCPUs are stopped, or the group is frozen. A file that cannot be read counts as running.
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

/// Third field of proc_pid_stat(5). The name before it may contain parentheses.
fn state(stat: &[u8]) -> Option<u8> {
    let close = stat.iter().rposition(|&byte| byte == b')')?;
    stat.get(close + 2).copied()
}

/// Whether `cgroup.events` says that the group, or one above it, is frozen (kernel
/// Documentation/admin-guide/cgroup-v2.rst).
fn is_frozen(events: &[u8]) -> bool {
    events
        .split(|&byte| byte == b'\n')
        .any(|line| line == b"frozen 1")
}

/// A thread that works for the VM.
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

/// State that the threads share.
#[derive(Debug)]
pub(super) struct PauseWatch {
    now: AtomicBool,
    inner: Mutex<Inner>,
    wakeup: Condvar,
}

impl PauseWatch {
    /// Starts the thread. It closes `gate` while the VM is paused, and signals each change to `changed`.
    pub(super) fn start(gate: EgressGate, changed: Arc<OwnedFd>) -> io::Result<Arc<Self>> {
        let inner = Inner {
            probe: PauseProbe::default(),
            busy: [false; 2],
            stopping: false,
        };
        let shared = Arc::new(Self {
            now: AtomicBool::new(false),
            inner: Mutex::new(inner),
            wakeup: Condvar::new(),
        });
        let thread = shared.clone();
        std::thread::Builder::new()
            .name("viola-pulse".into())
            .spawn(move || thread.run(&gate, &changed))?;
        Ok(shared)
    }

    /// Whether the VM is paused; `false` while no thread works for it.
    pub(super) fn is_paused(&self) -> bool {
        self.now.load(Ordering::Acquire)
    }

    pub(super) fn watch(&self, probe: PauseProbe) {
        self.lock().probe = probe;
    }

    /// Notes whether a thread has work for the VM.
    pub(super) fn set_busy(&self, who: Thread, busy: bool) {
        let mut inner = self.lock();
        if std::mem::replace(&mut inner.busy[who as usize], busy) != busy {
            self.wakeup.notify_one();
        }
    }

    pub(super) fn stop(&self) {
        self.lock().stopping = true;
        self.wakeup.notify_one();
    }

    fn lock(&self) -> MutexGuard<'_, Inner> {
        self.inner.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn run(&self, gate: &EgressGate, changed: &OwnedFd) {
        let mut inner = self.lock();
        while !inner.stopping {
            let busy = inner.busy.contains(&true);
            let paused = busy && inner.probe.is_paused();
            // if the gate cannot be closed, the sockets still send what they have; the threads move no more in any
            // case
            if paused != self.is_paused() {
                let _ = gate.set_closed(paused);
                self.now.store(paused, Ordering::Release);
                wake(changed);
            }
            inner = if busy {
                let waited = self.wakeup.wait_timeout(inner, POLL_INTERVAL);
                waited.unwrap_or_else(PoisonError::into_inner).0
            } else {
                let waited = self.wakeup.wait(inner);
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
    fn the_state_is_read_behind_any_process_name() {
        assert_eq!(state(b"7 (a) T (b) T 1 7"), Some(b'T'));
        assert_eq!(state(b"7 (linux) S 1 7"), Some(b'S'));
        for bad in [&b""[..], b"7 (linux", b"7 (linux)", b"7 (linux) "] {
            assert_eq!(state(bad), None);
        }
    }

    #[test]
    fn only_the_frozen_line_counts() {
        assert!(is_frozen(b"populated 1\nfrozen 1\n"));
        assert!(!is_frozen(b"populated 1\nfrozen 0\n"));
        assert!(!is_frozen(b"populated 1\nunfrozen 1\n"));
    }

    #[test]
    fn a_vm_is_paused_when_all_its_threads_are() {
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
