// SPDX-License-Identifier: Apache-2.0
//! Restores every thread's scheduling.
//!
//! Before the first change a mechanism writes the attributes of each thread to a small file under /run. Every process that
//! notices the controller's end (the watchdog, the controller's main thread, the daemon, `viola restore`, the next start) reads
//! the file and restores the threads. Threads that a VM created meanwhile get the attributes of the VM's main thread. Restoring
//! is idempotent, and changes only threads that still have a priority of viola's.

use std::collections::BTreeSet;
use std::fs;
use std::io::{self, Write};
use std::os::unix::fs::OpenOptionsExt;
use std::path::{Path, PathBuf};

use serde::{Deserialize, Serialize};
use viola_host::attrs::{self, AttrError, Policy, SavedThread, SchedAttr};
use viola_host::{CpuSet, HostError, ServiceKind, Thread, Tid, Vm, proc};

use crate::plan::Plan;
use crate::priorities::PRIORITIES;

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
    /// A file of procfs could not be read.
    #[error(transparent)]
    Host(#[from] HostError),
}

/// One VM as it was before viola changed it.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct SavedVm {
    /// Name, for messages.
    pub id: String,
    /// Main process.
    pub pid: Tid,
    /// Its start time, clock ticks after boot; identifies the process when the number is reused.
    pub start_time: u64,
    /// Attributes for threads that are not listed: those of the main thread.
    pub default: SchedAttr,
    /// Affinity of the main thread.
    pub affinity: CpuSet,
    /// Whether viola pinned its threads, so that affinities must be restored too.
    pub pinned: bool,
    /// Its threads, each as it was.
    pub threads: Vec<SavedThread>,
    /// Other processes whose threads work for the VM, with their start times. They may outlive it.
    #[serde(default)]
    pub helpers: Vec<(Tid, u64)>,
}

/// The contents of the file.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct SavedState {
    /// Processes of viola's that a killed daemon may leave behind (the watchdog): pid and start time.
    pub processes: Vec<(Tid, u64)>,
    /// VMs that viola changed.
    pub vms: Vec<SavedVm>,
}

/// How much was restored.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct RestoreCount {
    /// VMs examined.
    pub vms: usize,
    /// Threads restored.
    pub threads: usize,
}

impl SavedState {
    /// Reads the file; an absent file is empty.
    ///
    /// # Errors
    /// [`RestoreError`].
    pub fn read(path: &Path) -> Result<Self, RestoreError> {
        match fs::read(path) {
            Ok(bytes) => serde_json::from_slice(&bytes).map_err(|e| RestoreError::Damaged {
                path: path.to_owned(),
                why: e.to_string(),
            }),
            Err(e) if e.kind() == io::ErrorKind::NotFound => Ok(Self::default()),
            Err(source) => Err(RestoreError::File {
                path: path.to_owned(),
                source,
            }),
        }
    }

    /// Replaces the file atomically: a reader sees the old or the new one.
    ///
    /// # Errors
    /// [`RestoreError::File`].
    pub fn write(&self, path: &Path) -> Result<(), RestoreError> {
        let fail = |source| RestoreError::File {
            path: path.to_owned(),
            source,
        };
        let temporary = path.with_extension("new");
        let json = serde_json::to_vec(self).map_err(|e| fail(e.into()))?;
        let mut file = fs::OpenOptions::new()
            .write(true)
            .create(true)
            .truncate(true)
            .mode(0o600)
            .open(&temporary)
            .map_err(fail)?;
        file.write_all(&json).map_err(fail)?;
        fs::rename(&temporary, path).map_err(fail)
    }

    /// Records every VM of a plan; returns whether anything is new. Call it before the first change: only recorded attributes can be
    /// restored.
    pub(crate) fn record_plan(&mut self, plan: &Plan, vms: &[Vm]) -> Result<bool, RestoreError> {
        let before = self.clone();
        for planned in plan.cores.iter().flat_map(|core| &core.vms) {
            if let Some(vm) = vms.iter().find(|vm| vm.pid as i32 == planned.pid) {
                self.record(vm, false)?;
            }
        }
        Ok(*self != before)
    }

    /// Records the present attributes of a VM's threads, except those already recorded and those with a priority of viola's
    /// (created since).
    ///
    /// # Errors
    /// [`RestoreError`].
    pub fn record(&mut self, vm: &Vm, pinned: bool) -> Result<(), RestoreError> {
        self.vms.retain(|s| {
            s.id != vm.id.as_str() || (s.pid == vm.pid && s.start_time == vm.start_time)
        });
        let at = match self.vms.iter().position(|s| s.pid == vm.pid) {
            Some(at) => at,
            None => {
                let main = Thread {
                    pid: vm.pid,
                    tid: vm.pid,
                    start_time: vm.start_time,
                };
                let Some(saved) = SavedThread::capture(&main)? else {
                    return Ok(());
                };
                let default = if is_ours(&saved.attr) {
                    SchedAttr::fair(0)
                } else {
                    saved.attr
                };
                self.vms.push(SavedVm {
                    id: vm.id.to_string(),
                    pid: vm.pid,
                    start_time: vm.start_time,
                    default,
                    affinity: saved.affinity,
                    pinned,
                    threads: Vec::new(),
                    helpers: Vec::new(),
                });
                self.vms.len() - 1
            }
        };
        let entry = &mut self.vms[at];
        entry.pinned |= pinned;
        for service in &vm.service {
            let pid = service.thread.pid;
            let is_other = matches!(service.kind, ServiceKind::Backend | ServiceKind::Vhost);
            if is_other
                && pid != vm.pid
                && let Some(stat) = proc::stat(pid)?
                && !entry.helpers.contains(&(pid, stat.start_time))
            {
                entry.helpers.push((pid, stat.start_time));
            }
        }
        for thread in vm.threads() {
            if entry
                .threads
                .iter()
                .any(|s| s.tid == thread.tid && s.start_time == thread.start_time)
            {
                continue;
            }
            if let Some(saved) = SavedThread::capture(thread)?
                && !is_ours(&saved.attr)
            {
                entry.threads.retain(|s| s.tid != thread.tid);
                entry.threads.push(saved);
            }
        }
        Ok(())
    }
}

fn is_ours(attr: &SchedAttr) -> bool {
    // Only viola gives single threads SCHED_EXT; a sched_ext scheduler for all tasks leaves their policy.
    attr.policy == Policy::Ext
        || attr.policy == Policy::Fifo && PRIORITIES.contains(&(attr.rt_priority as i32))
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
    let mut done = RestoreCount::default();
    let mut failed = None;
    for vm in &state.vms {
        done.vms += 1;
        match restore_vm(vm) {
            Ok(n) => done.threads += n,
            Err(e) => failed = Some(e),
        }
    }
    failed.map_or(Ok(done), Err)
}

/// Restores one VM; returns the number of changes. Repeats until nothing is left, since the guest
/// may fork meanwhile: a process that a restored thread forks inherits the restored attributes.
///
/// # Errors
/// [`RestoreError`].
pub fn restore_vm(saved: &SavedVm) -> Result<usize, RestoreError> {
    let mut done = 0;
    for _ in 0..10 {
        let mut left = 0;
        for tid in saved.living()? {
            let Some(attr) = attrs::get(tid)? else {
                continue;
            };
            let known = saved.threads.iter().find(|s| s.tid == tid);
            if is_ours(&attr) {
                let _ = attrs::set(tid, saved.attr_of(tid)?)?;
                left += 1;
            }
            if saved.pinned {
                let to = known.map_or(&saved.affinity, |s| &s.affinity);
                if attrs::affinity(tid)?.is_some_and(|now| now != *to) {
                    let _ = attrs::set_affinity(tid, to)?;
                    left += 1;
                }
            }
        }
        done += left;
        if left == 0 {
            break;
        }
    }
    Ok(done)
}

/// Restores some threads of a VM.
pub(crate) fn restore_threads(saved: &SavedVm, tids: &BTreeSet<Tid>) -> Result<(), RestoreError> {
    if tids.is_empty() {
        return Ok(());
    }
    for tid in saved.living()?.intersection(tids) {
        if attrs::get(*tid)?.is_some_and(|attr| is_ours(&attr)) {
            let _ = attrs::set(*tid, saved.attr_of(*tid)?)?;
        }
    }
    Ok(())
}

/// Restores the slice of the fair class, for threads whose class has not changed.
///
/// # Errors
/// [`RestoreError`].
pub fn restore_slices(saved: &SavedVm) -> Result<usize, RestoreError> {
    let mut done = 0;
    for tid in saved.living()? {
        let Some(mut attr) = attrs::get(tid)? else {
            continue;
        };
        let to = saved
            .threads
            .iter()
            .find(|s| s.tid == tid)
            .map_or(&saved.default, |s| &s.attr);
        if attr.policy == to.policy && attr.runtime != to.runtime {
            attr.runtime = to.runtime;
            let _ = attrs::set(tid, &attr)?;
            done += 1;
        }
    }
    Ok(done)
}

impl SavedVm {
    /// The attributes that a thread had. A reused number belongs to a thread created since.
    fn attr_of(&self, tid: Tid) -> Result<&SchedAttr, HostError> {
        let known = self.threads.iter().find(|s| s.tid == tid);
        let same = match known {
            Some(s) => proc::stat(tid)?.is_some_and(|p| p.start_time == s.start_time),
            None => false,
        };
        Ok(known.filter(|_| same).map_or(&self.default, |s| &s.attr))
    }

    /// The present threads of the VM, of its descendants and of the processes that work for it.
    fn living(&self) -> Result<BTreeSet<Tid>, HostError> {
        let lives = |pid: Tid, start_time: u64| {
            Ok::<_, HostError>(proc::stat(pid)?.is_some_and(|s| s.start_time == start_time))
        };
        let mut all = match lives(self.pid, self.start_time)? {
            true => threads_of(self.pid)?,
            false => BTreeSet::new(),
        };
        for (pid, start_time) in &self.helpers {
            if lives(*pid, *start_time)? {
                all.extend(proc::thread_ids(*pid)?);
            }
        }
        Ok(all)
    }
}

/// All threads of a process and of its descendants (UML: the guest's processes).
fn threads_of(pid: Tid) -> Result<BTreeSet<Tid>, HostError> {
    let mut all = BTreeSet::new();
    let mut processes = vec![pid];
    let mut next = 0;
    while next < processes.len() {
        let process = processes[next];
        next += 1;
        all.extend(proc::thread_ids(process)?);
        for child in proc::children(process)? {
            if !processes.contains(&child) {
                processes.push(child);
            }
        }
    }
    Ok(all)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_absent_file_is_empty_and_a_damaged_one_is_refused() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("slots.json");
        assert_eq!(SavedState::read(&path).unwrap(), SavedState::default());
        fs::write(&path, b"{\"vms\":").unwrap();
        let error = SavedState::read(&path).unwrap_err().to_string();
        assert!(
            error.contains("slots.json") && error.contains("chrt"),
            "{error}"
        );
    }

    #[test]
    fn the_state_survives_the_file_without_leftovers() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("slots.json");
        let state = SavedState {
            processes: vec![(7, 8)],
            vms: Vec::new(),
        };
        state.write(&path).unwrap();
        assert_eq!(SavedState::read(&path).unwrap(), state);
        assert_eq!(fs::read_dir(dir.path()).unwrap().count(), 1);
    }

    /// A sleeping process.
    struct Sleeper(std::process::Child);

    impl Sleeper {
        fn new() -> Self {
            let child = std::process::Command::new("sleep").arg("60").spawn();
            Self(child.unwrap())
        }

        fn thread(&self) -> Thread {
            let (pid, tid) = (self.0.id(), self.0.id());
            let start_time = proc::stat(pid).unwrap().unwrap().start_time;
            Thread {
                pid,
                tid,
                start_time,
            }
        }
    }

    impl Drop for Sleeper {
        fn drop(&mut self) {
            let _ = self.0.kill();
            let _ = self.0.wait();
        }
    }

    #[test]
    fn a_process_that_works_for_a_vm_is_restored_after_the_vm_has_ended() {
        let (vm, backend) = (Sleeper::new(), Sleeper::new());
        let (main, worker) = (vm.thread(), backend.thread());
        let kind = ServiceKind::Backend;
        let thread = worker;
        let noted: Vm = serde_json::from_value(serde_json::json!({
            "id": "uml:x", "name": "x", "hypervisor": "uml",
            "pid": main.pid, "start_time": main.start_time,
            "vcpus": [{"index": 0, "threads": [main], "kernel_thread": null, "cores": CpuSet::new()}],
            "service": [viola_host::ServiceThread { thread, kind }],
            "disks": [], "nics": [], "cgroup": null, "cores": CpuSet::new(), "status": null
        }))
        .unwrap();
        let mut state = SavedState::default();
        state.record(&noted, false).unwrap();
        assert_eq!(state.vms[0].helpers, [(worker.pid, worker.start_time)]);
        // real-time classes need root
        if attrs::set(worker.tid, &SchedAttr::fifo(18)).is_err() {
            return;
        }
        drop(vm);
        assert_eq!(restore_vm(&state.vms[0]).unwrap(), 1);
        let now = attrs::get(worker.tid).unwrap().unwrap();
        assert_eq!(now.policy, SchedAttr::fair(0).policy);
    }

    #[test]
    fn only_priorities_of_violas_are_restored() {
        assert!(is_ours(&SchedAttr::fifo(18)));
        assert!(!is_ours(&SchedAttr::fifo(50)));
        assert!(!is_ours(&SchedAttr::fair(0)));
    }
}
