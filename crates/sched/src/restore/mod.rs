// SPDX-License-Identifier: Apache-2.0
//! Restores every thread's scheduling.
//!
//! Before the first change a mechanism writes the attributes of each thread to a small file under /run. Every process that
//! notices the controller's end (the watchdog, the controller's main thread, the daemon, `viola restore`, the next start) reads
//! the file and restores the threads. Threads that a VM created meanwhile get the attributes of the VM's main thread, also in
//! processes that have left the VM's process tree (`own_groups.rs`). Restoring is idempotent, and changes only threads that still
//! have a priority of viola's.

mod own_groups;
mod saved;
#[cfg(test)]
mod tests;

use std::collections::BTreeSet;
use std::fs;
use std::io;
use std::path::{Path, PathBuf};

use viola_host::attrs::{self, AttrError, Outcome, Policy, SchedAttr};
use viola_host::{HostError, Tid, proc};

use crate::priorities::PRIORITIES;
pub use own_groups::OwnGroups;
use own_groups::Sessions;
pub use saved::{SavedState, SavedVm};

/// Most passes over the threads of VMs that go on forking.
const MAX_PASSES: usize = 20;

/// Why attributes could not be saved or restored.
#[derive(Debug, thiserror::Error)]
pub enum RestoreError {
    /// The file of saved attributes cannot be read or written.
    #[error("{path}: {source}", path = path.display())]
    File {
        /// The file.
        path: PathBuf,
        /// The system's error.
        source: io::Error,
    },
    /// The file of saved attributes is damaged.
    #[error("{path} is not a file of saved attributes ({why}); remove it, and set the class of the VMs' threads with chrt", path = path.display())]
    Damaged {
        /// The file.
        path: PathBuf,
        /// What is wrong with it.
        why: String,
    },
    /// A thread's attributes could not be read or set.
    #[error(transparent)]
    Attr(#[from] AttrError),
    /// Processes of a VM fork faster than they can be restored.
    #[error(
        "{threads} threads of {vms} are still real-time after {MAX_PASSES} passes, since they go on forking; end the VM and run viola restore"
    )]
    StillForking {
        /// Names of the VMs.
        vms: String,
        /// Threads that the last pass changed.
        threads: usize,
    },
    /// A file of procfs could not be read.
    #[error(transparent)]
    Host(#[from] HostError),
}

/// How much was restored.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct RestoreCount {
    /// VMs examined.
    pub vms: usize,
    /// Threads restored.
    pub threads: usize,
}

fn is_ours(attr: &SchedAttr) -> bool {
    // Only viola gives single threads SCHED_EXT; a sched_ext scheduler for all tasks leaves their policy.
    attr.policy == Policy::Ext
        || attr.policy == Policy::Fifo && PRIORITIES.contains(&(attr.rt_priority as i32))
}

/// Whether a thread of a VM may have its priority from viola. A thread can lower a real-time priority without any right.
fn is_from_ours(attr: &SchedAttr) -> bool {
    is_ours(attr) || attr.policy == Policy::Fifo && attr.rt_priority as i32 <= *PRIORITIES.end()
}

/// Restores every VM of the file, and removes the file when nothing failed.
///
/// # Errors
/// The last [`RestoreError`]; the other VMs are still restored.
pub fn restore_file(path: &Path) -> Result<RestoreCount, RestoreError> {
    let done = restore_all(path)?;
    let _ = fs::remove_file(path);
    Ok(done)
}

/// As [`restore_file`], but keeps the file.
///
/// # Errors
/// As [`restore_file`].
pub fn restore_and_keep_file(path: &Path) -> Result<(), RestoreError> {
    restore_all(path).map(|_| ())
}

fn restore_all(path: &Path) -> Result<RestoreCount, RestoreError> {
    let state = SavedState::read(path)?;
    Ok(RestoreCount {
        vms: state.vms.len(),
        threads: restore_vms(&state.vms)?,
    })
}

/// As [`restore_vms`], for one VM.
///
/// # Errors
/// [`RestoreError`].
pub fn restore_vm(saved: &SavedVm) -> Result<usize, RestoreError> {
    restore_vms(std::slice::from_ref(saved))
}

/// Restores VMs; returns the number of changes. First the threads of each VM's process tree, then those that have left it. Repeats
/// until nothing is left, since a process that forks meanwhile passes its real-time priority on.
///
/// # Errors
/// The last [`RestoreError`]; all other threads are still restored. [`RestoreError::StillForking`] when threads are left.
pub fn restore_vms(vms: &[SavedVm]) -> Result<usize, RestoreError> {
    let mut done = 0;
    let mut left = Vec::new();
    // Each once: a CPU that is offline now keeps an affinity from being what it was.
    let mut moved = BTreeSet::new();
    let mut unmoved = None;
    for pass in 0..MAX_PASSES {
        left.clear();
        let mut failed = None;
        let wide = pass > 0 && vms.iter().any(|vm| vm.own.session.is_some());
        let sessions = match wide.then(Sessions::read).transpose() {
            Ok(sessions) => sessions.unwrap_or_default(),
            Err(e) => {
                failed = Some(e.into());
                Sessions::default()
            }
        };
        for vm in vms {
            let mut threads = match vm.living() {
                Ok(threads) => threads,
                Err(e) => {
                    failed = Some(e.into());
                    BTreeSet::new()
                }
            };
            if pass > 0 {
                match vm.own.threads((vm.pid, vm.start_time), &sessions) {
                    Ok(strays) => threads.extend(strays),
                    Err(e) => failed = Some(e.into()),
                }
            }
            let mut changed = 0;
            for tid in threads {
                match vm.restore_attr(tid) {
                    Ok(n) => changed += n,
                    Err(e) => failed = Some(e),
                }
                if vm.pinned && moved.insert(tid) {
                    match vm.restore_affinity(tid) {
                        Ok(n) => done += n,
                        Err(e) => unmoved = Some(e),
                    }
                }
            }
            if changed > 0 {
                left.push((vm.id.as_str(), changed));
            }
            done += changed;
        }
        if left.is_empty() && pass > 0 {
            return failed.or(unmoved).map_or(Ok(done), Err);
        }
    }
    let vms: Vec<&str> = left.iter().map(|(id, _)| *id).collect();
    Err(RestoreError::StillForking {
        vms: vms.join(", "),
        threads: left.iter().map(|(_, n)| n).sum(),
    })
}

/// Restores some threads of a VM.
pub(crate) fn restore_threads(saved: &SavedVm, tids: &BTreeSet<Tid>) -> Result<(), RestoreError> {
    if tids.is_empty() {
        return Ok(());
    }
    for tid in saved.living()?.intersection(tids) {
        saved.restore_attr(*tid)?;
    }
    Ok(())
}

/// Restores the slices of the fair class of VMs, for threads whose class has not changed. Returns the number of changes.
///
/// # Errors
/// The last [`RestoreError`]; all other threads are still restored.
pub fn restore_slices(vms: &[SavedVm]) -> Result<usize, RestoreError> {
    let mut done = 0;
    let mut failed = None;
    for saved in vms {
        let threads = saved.living().unwrap_or_else(|e| {
            failed = Some(e.into());
            BTreeSet::new()
        });
        for tid in threads {
            match restore_slice(saved, tid) {
                Ok(n) => done += n,
                Err(e) => failed = Some(e),
            }
        }
    }
    failed.map_or(Ok(done), Err)
}

/// Restores the slice of a thread. Returns the number of changes, 0 or 1.
fn restore_slice(saved: &SavedVm, tid: Tid) -> Result<usize, RestoreError> {
    let Some(mut attr) = attrs::get(tid)? else {
        return Ok(0);
    };
    let of_thread = saved.threads.iter().find(|s| s.tid == tid);
    let to = of_thread.map_or(&saved.default, |s| &s.attr);
    if attr.policy != to.policy || attr.runtime == to.runtime {
        return Ok(0);
    }
    attr.runtime = to.runtime;
    let _ = attrs::set(tid, &attr)?;
    Ok(1)
}

impl SavedVm {
    /// Returns the number of changes, as the other functions that restore.
    fn restore_affinity(&self, tid: Tid) -> Result<usize, RestoreError> {
        let known = self.threads.iter().find(|s| s.tid == tid);
        let to = known.map_or(&self.affinity, |s| &s.affinity);
        match attrs::affinity(tid)? {
            Some(now) if now != *to => {
                let _ = attrs::set_affinity(tid, to)?;
                Ok(1)
            }
            _ => Ok(0),
        }
    }

    fn restore_attr(&self, tid: Tid) -> Result<usize, RestoreError> {
        let Some(now) = attrs::get(tid)? else {
            return Ok(0);
        };
        let is_viola_s = match self.pinned {
            true => is_ours(&now),
            false => is_from_ours(&now),
        };
        let to = self.attr_of(tid)?;
        if !is_viola_s || now == *to {
            return Ok(0);
        }
        // Clears SCHED_RESET_ON_FORK, too, unless the thread had it before.
        Ok(usize::from(attrs::set(tid, to)? == Outcome::Done))
    }

    /// The attributes that a thread had. A reused number belongs to a thread created since.
    fn attr_of(&self, tid: Tid) -> Result<&SchedAttr, HostError> {
        let known = self.threads.iter().find(|s| s.tid == tid);
        let same = match known {
            Some(s) => proc::stat(tid)?.is_some_and(|p| p.start_time == s.start_time),
            None => false,
        };
        Ok(known.filter(|_| same).map_or(&self.default, |s| &s.attr))
    }

    /// The present threads of the VM, of its descendants and of the processes that work for it, and those recorded, which may have
    /// lost their parents.
    fn living(&self) -> Result<BTreeSet<Tid>, HostError> {
        let mut all = match is_same(self.pid, self.start_time)? {
            true => threads_of(self.pid)?,
            false => BTreeSet::new(),
        };
        for (pid, start_time) in &self.helpers {
            if is_same(*pid, *start_time)? {
                all.extend(proc::thread_ids(*pid)?);
            }
        }
        let saved = self.threads.iter().map(|s| (s.tid, s.start_time));
        for (tid, start_time) in saved.chain(self.forked.iter().copied()) {
            if !all.contains(&tid) && is_same(tid, start_time)? {
                all.insert(tid);
            }
        }
        Ok(all)
    }
}

/// Whether the number still belongs to the thread that began then.
fn is_same(tid: Tid, start_time: u64) -> Result<bool, HostError> {
    Ok(proc::stat(tid)?.is_some_and(|s| s.start_time == start_time))
}

/// A process and its descendants (UML: the guest's processes).
fn processes_of(pid: Tid) -> Result<Vec<Tid>, HostError> {
    let mut processes = vec![pid];
    let mut known = BTreeSet::from([pid]);
    let mut next = 0;
    while let Some(&process) = processes.get(next) {
        next += 1;
        for child in proc::children(process)? {
            if known.insert(child) {
                processes.push(child);
            }
        }
    }
    Ok(processes)
}

/// All threads of a process and of its descendants.
fn threads_of(pid: Tid) -> Result<BTreeSet<Tid>, HostError> {
    let mut all = BTreeSet::new();
    for process in processes_of(pid)? {
        all.extend(proc::thread_ids(process)?);
    }
    Ok(all)
}
